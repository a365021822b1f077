"""What the engine refuses, counts and reports; that its texts are right is ../losslessness."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.runtime.engine.driver import (
    EOS,
    MAX_MODEL_LEN,
    ON,
    SUSPENDED,
    Collector,
    assert_all_free,
    make_engine,
    naive,
    run,
)
from tests.runtime.tiny import VOCAB, tiny_pair

from outrider_runtime.config import CacheConfig, EngineConfig, SourceConfig
from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.errors import BadRequest
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.speculation.policy import Policy

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13)


@pytest.mark.parametrize(
    ("prompt", "params", "param", "code", "message"),
    [
        ((), GREEDY, "prompt", None, "empty"),
        ((1,) * MAX_MODEL_LEN, GREEDY, "prompt", "context_length_exceeded", "96 tokens; the context of 96 leaves no"),
        ((1, VOCAB), GREEDY, "prompt", None, "from 0 to 60"),
        ((-1,), GREEDY, "prompt", None, "from 0 to 60"),
        ((1,), replace(GREEDY, max_tokens=0), "max_tokens", None, "at least 1, not 0"),
        *(
            ((1,), replace(GREEDY, **{field: value}), field, None, message)
            for field, value, message in [
                ("temperature", -0.1, "from 0 to 3e"),
                ("temperature", math.nan, "not nan"),
                ("top_k", -1, "not -1"),
                ("top_p", 1.1, "from 0 to 1, not 1.1"),
                ("min_p", 1.5, "from 0 to 1, not 1.5"),
                ("presence_penalty", math.inf, "not inf"),
                ("repetition_penalty", 0.0, "above 0"),
                ("min_tokens", -1, "not -1"),
                ("logprobs", 21, "from 0 to 20, not 21"),
                ("speculative", -1, "not -1"),
                ("logit_bias", ((VOCAB, 1.0),), "from 0 to 60"),
                ("logit_bias", ((1, math.nan),), "not nan"),
                ("logit_bias", ((1, 1.0), (1, 2.0)), "names a token id twice"),
                ("logit_bias", tuple((token, 1.0) for token in range(1025)), "1024 token ids, not 1025"),
                ("stop_token_ids", (-1,), "from 0 to 60"),
                ("stop_token_ids", tuple(range(65)), "64 token ids, not 65"),
                ("bad_words", ((5, VOCAB),), "from 0 to 60"),
                ("bad_words", ((),), "without tokens"),
                ("bad_words", ((1,) * 17,), "16 tokens in each, not 17"),
                ("bad_words", tuple((token % 60, token // 60) for token in range(129)), "128 sequences, not 129"),
            ]
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_by_field(prompt, params, param, code, message):
    engine = make_engine()
    with pytest.raises(BadRequest, match=message) as refused:
        engine.add(AddRequest("it", prompt, params))
    assert (refused.value.param, refused.value.code) == (param, code)
    assert not engine.has_work


def test_an_id_in_use_is_refused_and_free_again_after_the_end():
    engine = make_engine()
    engine.add(AddRequest("it", PROMPT, GREEDY))
    with pytest.raises(BadRequest, match="id it is in use"):
        engine.add(AddRequest("it", PROMPT, GREEDY))
    run(engine, [])
    assert run(engine, [AddRequest("it", PROMPT, GREEDY)]).text("it") == naive(PROMPT, GREEDY)


def test_a_cache_without_room_for_one_request_is_an_error():
    config = EngineConfig(SourceConfig("tiny"), cache=CacheConfig(block_size=4, num_blocks=4))
    with pytest.raises(ValueError, match=r"num_blocks \(4\) must hold a context of 32 tokens"):
        Engine(config, tiny_pair()[1], max_model_len=32)


def test_the_longest_prompt_gets_one_token():
    prompt = (5,) * (MAX_MODEL_LEN - 1)
    collector = run(make_engine("equal draft"), [AddRequest("it", prompt, GREEDY)])
    assert collector.finish_reason("it") == "length"
    assert len(collector.tokens("it")) == 1


def test_an_idle_step_does_nothing():
    output = make_engine().step()
    assert output.deltas == ()
    assert output.stats.generated_tokens == 0


def test_requests_without_a_seed_differ_with_one_they_do_not():
    unseeded = replace(GREEDY, temperature=1.0)
    seeded = replace(unseeded, seed=11)
    engine = make_engine()
    requests = [AddRequest(f"u{i}", PROMPT, unseeded) for i in range(4)]
    requests += [AddRequest(f"s{i}", PROMPT, seeded) for i in range(4)]
    collector = run(engine, requests)
    assert len({collector.tokens(f"u{i}") for i in range(4)}) == 4
    assert len({collector.tokens(f"s{i}") for i in range(4)}) == 1


@pytest.mark.parametrize("method", ["equal draft", "worse draft", "n-gram"])
def test_counters_are_the_sums_of_what_deltas_say(method):
    engine = make_engine(method, k=3)
    requests = [AddRequest(str(i), (*PROMPT, i), replace(GREEDY, max_tokens=7 + i)) for i in range(5)]
    collector = run(engine, requests)
    deltas = [delta for own in collector.deltas.values() for delta in own]
    stats = engine.stats()
    assert stats.generated_tokens == sum(len(delta.token_ids) for delta in deltas) == 7 + 8 + 9 + 10 + 11
    assert stats.prompt_tokens == 5 * (len(PROMPT) + 1)
    assert stats.drafts == sum(delta.drafted > 0 for delta in deltas)
    assert stats.draft_tokens == sum(delta.drafted for delta in deltas)
    assert stats.accepted_tokens == sum(delta.accepted for delta in deltas)
    assert stats.accepted_per_position == tuple(
        sum(delta.accepted > position for delta in deltas) for position in range(3)
    )


def test_the_first_delta_alone_tells_how_much_of_the_prompt_was_cached():
    engine = make_engine()
    run(engine, [AddRequest("a", PROMPT, GREEDY)])
    collector = run(engine, [AddRequest("b", PROMPT, GREEDY)])
    assert [delta.cached_tokens for delta in collector.deltas["b"]] == [8] + [None] * 11
    assert (engine.stats().prefix_cache_queries, engine.stats().prefix_cache_hits) == (18, 8)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["no speculation", "equal draft", "EAGLE-3"])
def test_choices_of_one_prompt_share_its_computation(method, overlap):
    engine = make_engine(method, overlap=overlap)
    collector = run(engine, [AddRequest(str(i), PROMPT, GREEDY) for i in range(4)])
    assert [collector.deltas[str(i)][0].cached_tokens for i in range(4)] == [0, 8, 8, 8]
    assert {collector.text(str(i)) for i in range(4)} == {naive(PROMPT, GREEDY)}
    assert_all_free(engine)


def test_eos_ends_a_text_and_is_its_last_token():
    engine = make_engine("equal draft")
    params = replace(GREEDY, temperature=3.0, max_tokens=80, ignore_eos=False)
    requests = [AddRequest(str(seed), PROMPT, replace(params, seed=seed)) for seed in range(8)]
    collector = run(engine, requests)
    ended = [request for request in requests if collector.finish_reason(request.request_id) == "stop"]
    assert ended
    for request in ended:
        tokens = collector.tokens(request.request_id)
        assert tokens.index(EOS) == len(tokens) - 1
        assert collector.deltas[request.request_id][-1].accepted <= len(tokens)


def test_stats_follow_requests_in_and_out():
    engine = make_engine(concurrency=1)
    engine.add(AddRequest("a", PROMPT, GREEDY))
    engine.add(AddRequest("b", PROMPT, GREEDY))
    assert (engine.stats().running, engine.stats().waiting) == (0, 2)
    stats = engine.step().stats
    assert (stats.running, stats.waiting) == (1, 1)
    assert stats.kv_cache_usage == 3 / 64
    engine.abort("a")
    engine.abort("a")
    engine.abort("nobody")
    assert (engine.stats().running, engine.stats().waiting) == (0, 1)
    engine.abort("b")
    assert_all_free(engine)
    assert not engine.has_work


def test_the_length_in_force_is_the_policys_when_idle_and_the_requests_mean_when_not():
    engine = make_engine("equal draft", k=8)
    assert engine.stats().effective_tokens == 8
    engine.set_policy(Policy(num_speculative_tokens=4))
    assert engine.stats().effective_tokens == 4
    engine.add(AddRequest("a", PROMPT, replace(GREEDY, max_tokens=60)))
    engine.add(AddRequest("b", PROMPT[:4], replace(GREEDY, max_tokens=60, speculative=1)))
    engine.step()  # prompts are read: nobody decodes yet
    assert engine.stats().effective_tokens == 4
    engine.step()
    assert engine.stats().effective_tokens == 2.5
    engine.set_policy(SUSPENDED)
    assert engine.stats().effective_tokens == 0
    engine.step()
    assert engine.stats().effective_tokens == 0
    engine.set_policy(ON)
    assert engine.stats().effective_tokens == 8


def test_without_its_draft_the_method_decodes_plainly():
    engine = make_engine("no speculation")
    assert engine.stats().effective_tokens == 0
    collector = run(engine, [AddRequest("it", PROMPT, GREEDY)])
    assert collector.text("it") == naive(PROMPT, GREEDY)
    assert engine.stats().drafts == 0


def test_an_abort_in_mid_draft_leaves_the_others_alone():
    engine = make_engine("worse draft")
    requests = [AddRequest(str(i), (*PROMPT, i), replace(GREEDY, max_tokens=30)) for i in range(4)]
    collector = Collector()
    for request in requests:
        engine.add(request)
    for _ in range(4):
        collector.take(engine.step().deltas)
    engine.abort("1")
    run(engine, [], collector)
    assert collector.finish_reason("1") is None
    for request in (requests[0], requests[2], requests[3]):
        assert collector.text(request.request_id) == naive(request.prompt, request.params)
    assert_all_free(engine)
