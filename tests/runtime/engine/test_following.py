"""Methods that draft from the target's hidden states, in the engine: what they draft, and that no text shows it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.runtime.batches import Span, make_batch
from tests.runtime.engine.driver import EOS, MAX_MODEL_LEN, ON, SUSPENDED, Collector, assert_all_free, run
from tests.runtime.engine.test_capture import EagerGraphs
from tests.runtime.heads import (
    blurred,
    eagle_draft,
    eagle_head,
    eagle_tensors,
    knowing_eagle,
    knowing_medusa,
    medusa_heads,
    successor_target,
    tensors,
)
from tests.runtime.tiny import VOCAB, ours, reference_model
from tests.runtime.verified import BLOCKS, ENDING, SIZE, verified_step

from outrider_runtime.config import CacheConfig, EngineConfig, SchedulerConfig, SourceConfig, SpeculationConfig
from outrider_runtime.engine import runner
from outrider_runtime.engine.capture import Extend, first, rest
from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.follow import entry_batch
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.pipeline import Row, sample

GREEDY = SamplingParams(max_tokens=14, temperature=0.0)
LONG = replace(GREEDY, max_tokens=60, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=14, seed=1),
    SamplingParams(max_tokens=14, seed=4, frequency_penalty=1.0, repetition_penalty=1.1, top_k=20),
    SamplingParams(max_tokens=14, seed=3, top_p=0.8, ignore_eos=True),
]
_random = random.Random(0)
PROMPTS = [tuple(_random.randrange(4, VOCAB) for _ in range(length)) for length in (1, 7, 40)]
PROMPTS += [PROMPTS[-1][:24], (*PROMPTS[-1][:24], 20, 21)]  # shared prefixes, of full blocks and not
METHODS = ("eagle3", "eagle", "medusa")


def target():
    """Of its own, since it is tapped."""
    return ours(reference_model())


def head_of(method, model, layers=1):
    if method == "medusa":
        return medusa_heads(model.config)
    return eagle_draft(3 if method == "eagle3" else 1, model, layers)


def make_engine(method, model=None, head=None, *, k=4, blocks=64, block_size=4, concurrency=8, budget=64, **more):
    model = model or target()
    config = EngineConfig(
        model=SourceConfig("tiny"),
        speculation=SpeculationConfig(method=method, max_tokens=k),
        cache=CacheConfig(block_size=block_size, num_blocks=blocks, prefix_caching=more.pop("prefix_caching", True)),
        scheduler=SchedulerConfig(max_concurrency=concurrency, max_batched_tokens=budget),
        policy=more.pop("policy", ON),
    )
    head = head or head_of(method, model)
    return Engine(config, model, head, eos_token_ids=(EOS,), max_model_len=MAX_MODEL_LEN, **more)


def everything() -> list[AddRequest]:
    return [
        AddRequest(f"{name}-{index}", prompt, params)
        for name, params in enumerate(PARAMS)
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def plain():
    """Texts by plain decoding, with nothing kept of others."""
    engine = make_engine("eagle3", policy=SUSPENDED, prefix_caching=False, concurrency=20, blocks=400)
    return run(engine, everything())


class Watched:
    """An engine's drafts, each with the text that it was made for."""

    def __init__(self, engine: Engine) -> None:
        self.seen: list[tuple[tuple[int, ...], SamplingParams, int, tuple[int, ...]]] = []
        proposer, state = engine._runner.proposer, engine._runner._state
        draft = proposer.draft

        def watched(feed, requests, length, mode):
            draft(feed, requests, length, mode)
            requests = min(requests, sum(feed.drafts > 0))  # the others are padding
            for slot, drafts in zip(feed.slots[:requests].tolist(), feed.drafts[:requests].tolist(), strict=True):
                end = int(state.lengths[slot])
                request = next(each for each in engine._scheduler.running if each.slot == slot)
                text = state.tokens[slot, : end + drafts].tolist()
                self.seen.append((tuple(text[:end]), request.params, request.prompt_length, tuple(text[end:])))

        proposer.draft = watched


def whole(method, model, head, text, params, prompt_length, count):
    """What the head drafts behind a text that target and head read whole, alone, with nothing kept from before."""
    blocks, size = list(range(64)), 4
    if method == "eagle3":
        model.tap(head.shape.tapped, 128)  # more tokens at once than the engine's steps have
    cache = KVCache(model.config, 64, size, torch.float32, "cpu")
    hidden = model(make_batch([Span(text[:-1], 0, blocks)], size, "cpu", model.attention_shape), cache)
    drafts: list[int] = []

    def drawn(logits):
        if getattr(head, "token_ids", None) is not None:
            logits = torch.full((1, VOCAB), -torch.inf).index_copy(1, head.token_ids, logits)
        row = Row(params, params.seed or 0, list(text), prompt_length, list(drafts))
        return int(sample(logits, [row], (EOS,)))

    if method == "medusa":
        for each, states in enumerate(head.states(hidden[-1:], count)):
            drafts.append(drawn(head.logits(each, states)))
        return tuple(drafts)
    cache = KVCache(head.config, 64, size, torch.float32, "cpu")
    shape = head.attention_shape
    states = head.states(hidden).clone()
    states = head(make_batch([Span(text[1:], 1, blocks)], size, "cpu", shape), states, cache)[-1:]
    for turn in range(count):
        if turn:
            states = head(
                make_batch([Span(drafts[-1:], len(text) + turn - 1, blocks)], size, "cpu", shape), states, cache
            )
        drafts.append(drawn(head.logits(states)))
    return tuple(drafts)


ROOMY = {"concurrency": 20, "blocks": 400, "budget": 128, "overlap": True}
TIGHT = {"blocks": 27, "k": 3, "overlap": True}  # preemption


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("eagle3", ROOMY),
        ("eagle3", {"budget": 8, "k": 3, "overlap": False}),  # chunks of at most 8 tokens
        ("eagle3", TIGHT),
        ("eagle3", {"block_size": 1, "blocks": 128, "k": 2, "overlap": False}),
        ("eagle3", {"layers": 2, "budget": 24}),
        ("eagle", TIGHT),
        ("medusa", ROOMY),
    ],
    ids=str,
)
def test_drafts_are_those_of_the_whole_text_and_texts_those_of_plain_decoding(method, setting, plain):
    model, setting = target(), dict(setting)
    head = head_of(method, model, setting.pop("layers", 1))
    engine = make_engine(method, model, head, **setting)
    watched = Watched(engine)
    requests = everything()
    random.Random(1).shuffle(requests)
    collector = run(engine, requests)
    for request in requests:
        assert collector.text(request.request_id) == plain.text(request.request_id), request
    assert_all_free(engine)
    for text, params, prompt_length, drafts in random.Random(2).sample(watched.seen, 15):
        assert drafts == whole(method, model, head, text, params, prompt_length, len(drafts)), (text, drafts)


@pytest.mark.parametrize("more", [{}, {"layers": 2}, {"norm_before_residual": True}], ids=str)
@pytest.mark.parametrize("version", [1, 3])
def test_states_at_texts_ends_and_kv_are_those_of_a_pass_over_all_tokens(version, more):
    model = ours(reference_model(), torch.float64)
    head = eagle_draft(version, model, **more)
    head.attach(model, 24)
    step = verified_step(24)
    state = step.state
    states = torch.randn(24, head.config.hidden_size, dtype=torch.float64)

    def run_over(whole):
        cache = KVCache(head.config, BLOCKS, SIZE, torch.float64, "cpu")
        shape, planned = head.attention_shape, whole or len(head.layers) > 0
        batch, ends, owners = entry_batch(state, step.feed, cache, shape, step.positions, whole=planned, small=True)
        found = head(batch, states.clone(), cache)[ends] if whole else head(batch, states.clone(), cache, ends)
        return found[owners != state.nobody], owners[owners != state.nobody], cache.arrays[:, :, : cache.nowhere]

    found, owners, kv = run_over(whole=False)
    expected, _, expected_kv = run_over(whole=True)
    assert owners.tolist() == ENDING
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(head.logits(found).argmax(1), head.logits(expected).argmax(1))
    assert torch.equal(kv, expected_kv)


@pytest.mark.parametrize("method", METHODS)
def test_accepted_drafts_leave_the_head_as_if_it_had_read_them(method):
    """Most of what this one drafts stands, but not all."""
    model = successor_target()
    head = knowing_medusa(model) if method == "medusa" else knowing_eagle(3 if method == "eagle3" else 1, model)
    blurred(head, 0.3 if method == "medusa" else 0.1)
    engine = make_engine(method, model, head, block_size=2, blocks=200)
    watched = Watched(engine)
    for _ in range(2):
        run(engine, [AddRequest(str(i), prompt, replace(LONG, max_tokens=20)) for i, prompt in enumerate(PROMPTS)])
    stats = engine.stats()
    assert 0.1 < stats.accepted_tokens / stats.draft_tokens < 1
    for text, params, prompt_length, drafts in random.Random(2).sample(watched.seen, 15):
        assert drafts == whole(method, model, head, text, params, prompt_length, len(drafts)), (text, drafts)


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_padded_programs_and_captures_between_requests_change_no_text(method, monkeypatch, plain):
    monkeypatch.setattr(runner, "Graphs", EagerGraphs)
    engine = make_engine(method, k=3, concurrency=5, budget=24)
    engine.capture(lambda line: None)
    graphs = engine._runner._graphs
    assert set(first(engine._runner.widths, 3)) <= set(graphs.keys)
    assert Extend(24, small=False) in graphs.keys
    watched = Watched(engine)
    requests = everything()[:10]
    collector = run(engine, requests)
    while engine.idle():
        pass
    assert set(rest(engine._runner.widths, [])) <= set(graphs.keys)
    run(engine, [replace(request, request_id=f"again {request.request_id}") for request in requests], collector)
    for request in requests:
        for request_id in (request.request_id, f"again {request.request_id}"):
            assert collector.text(request_id) == plain.text(request.request_id)
    assert len(watched.seen) > 20


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, repetition_penalty=1.3)], ids=["greedy", "with penalties"])
@pytest.mark.parametrize("method", METHODS)
def test_a_head_that_knows_what_its_target_says_is_accepted_whole(method, params):
    model = successor_target()
    head = knowing_medusa(model) if method == "medusa" else knowing_eagle(3 if method == "eagle3" else 1, model)
    engine = make_engine(method, model, head)
    requests = [AddRequest(str(i), prompt, replace(params, ignore_eos=True)) for i, prompt in enumerate(PROMPTS)]
    run(engine, requests)
    stats = engine.stats()
    assert stats.draft_tokens > 40
    assert stats.accepted_tokens / stats.draft_tokens > 0.99


@pytest.mark.parametrize("rows", [VOCAB - 2, VOCAB + 30])
@pytest.mark.parametrize("method", METHODS)
def test_a_head_whose_tables_are_padded_otherwise_drafts_what_both_have(method, rows):
    model = successor_target()
    if method == "medusa":
        head = knowing_medusa(model, rows=rows)
    else:
        head = knowing_eagle(3 if method == "eagle3" else 1, model, rows=rows)
    engine = make_engine(method, model, head)
    collector = run(engine, [AddRequest(str(i), prompt, LONG) for i, prompt in enumerate(PROMPTS)])
    alone = run(make_engine(method, model, head, policy=SUSPENDED), [AddRequest("0", PROMPTS[0], LONG)])
    assert collector.text("0") == alone.text("0")
    assert engine.stats().accepted_tokens / engine.stats().draft_tokens > (0.99 if rows > VOCAB else 0.8)


def test_an_eagle_3_head_with_tables_of_its_own_may_be_of_another_hidden_size(plain):
    size, layer = 48, "midlayer"
    shapes = {name: tuple(tensor.shape) for name, tensor in eagle_tensors(3).items() if not name.endswith("2t")}
    shapes |= {name: (size,) for name in shapes if "norm" in name}
    shapes |= {
        f"{layer}.self_attn.{each}_proj.weight": (rows, 2 * size) for each, rows in (("q", 32), ("k", 16), ("v", 16))
    }
    shapes |= {f"{layer}.mlp.{each}_proj.weight": (40, size) for each in ("gate", "up")}
    shapes |= {f"{layer}.mlp.down_proj.weight": (size, 40), f"{layer}.self_attn.o_proj.weight": (size, 32)}
    shapes |= {"fc.weight": (size, 96), "embed_tokens.weight": (VOCAB, size), "lm_head.weight": (VOCAB, size)}
    model = target()
    head = eagle_head(3, model.config, tensors(shapes), hidden_size=size, head_dim=8, target_hidden_size=32)
    engine = make_engine("eagle3", model, head)
    collector = run(engine, everything())
    assert {each: collector.text(each) for each in plain.deltas} == {each: plain.text(each) for each in plain.deltas}
    assert engine.stats().accepted_tokens > 0


def test_with_the_targets_noise_a_sampled_text_is_known_as_well():
    model = successor_target()
    engine = make_engine("eagle3", model, knowing_eagle(3, model))
    run(engine, [AddRequest("it", PROMPTS[2], SamplingParams(max_tokens=40, seed=3, ignore_eos=True))])
    stats = engine.stats()
    assert stats.accepted_tokens / stats.draft_tokens > 0.95


def test_what_a_reduced_vocabulary_has_is_drawn_as_the_target_draws_it():
    """By the noise of the target's ids. At this temperature noise decides alone."""
    model = successor_target()
    head = knowing_eagle(3, model, reduced=True)
    engine = make_engine("eagle3", model, head, k=1)
    params = SamplingParams(max_tokens=60, temperature=100.0, seed=3, ignore_eos=True)
    deltas = run(engine, [AddRequest("it", PROMPTS[1], params)]).deltas["it"]
    known = set(head.token_ids.tolist())
    verified = [delta for delta in deltas if delta.drafted]
    assert all((delta.accepted == 1) == (delta.token_ids[0] in known) for delta in verified)
    assert 15 < sum(delta.accepted for delta in verified) < len(verified)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drafted(engine: Engine, request_id: str, steps: int) -> int:
    deltas = [delta for _ in range(steps) for delta in engine.step().deltas if delta.request_id == request_id]
    return sum(delta.drafted for delta in deltas)


@pytest.mark.parametrize("method", METHODS)
def test_a_short_pause_costs_nobody_its_drafts_and_after_a_long_one_only_new_requests_draft(method, plain):
    clock = Clock()
    model = target()
    head = head_of(method, model)
    engine = make_engine(method, model, head, clock=clock)
    watched = Watched(engine)
    engine.add(AddRequest("old", PROMPTS[1], LONG))
    assert drafted(engine, "old", 4) > 0
    for seconds in (1.0, 3.0):
        engine.set_policy(SUSPENDED)
        assert drafted(engine, "old", 2) == 0
        clock.now += seconds
        assert drafted(engine, "old", 2) == 0
        engine.set_policy(ON)
        assert (drafted(engine, "old", 2) > 0) == (seconds < 2)
    engine.add(AddRequest("new", PROMPTS[1], LONG))
    assert drafted(engine, "new", 4) > 0
    for text, params, prompt_length, drafts in watched.seen[-2:]:
        assert drafts == whole(method, model, head, text, params, prompt_length, len(drafts))
    assert drafted(engine, "old", 2) == 0
    collector = run(engine, [AddRequest("again", PROMPTS[1], GREEDY)])
    assert collector.text("again") == plain.text("0-1")


def test_a_cached_prefix_that_was_not_followed_is_computed_again_once():
    engine = make_engine("eagle3", policy=SUSPENDED, clock=Clock())
    engine._clock.now = 10.0
    one = replace(GREEDY, max_tokens=1)
    run(engine, [AddRequest("plain", PROMPTS[2], one)])
    engine.set_policy(ON)
    cached = [
        run(engine, [AddRequest(name, (*PROMPTS[2], 9), one)]).deltas[name][0].cached_tokens for name in ("a", "b")
    ]
    assert cached == [0, 40]
    plainly = replace(one, speculative=0)
    engine.set_policy(SUSPENDED)
    assert run(engine, [AddRequest("c", (*PROMPTS[2], 9), plainly)]).deltas["c"][0].cached_tokens == 40


def test_the_token_before_a_chunk_behind_a_cached_prefix_leaves_its_kv_alone():
    engine = make_engine("eagle3")
    run(engine, [AddRequest("first", PROMPTS[2], replace(GREEDY, max_tokens=1))])
    keys = [layer[0] for layer in engine._runner._cache.layers]
    before = [each.clone() for each in keys]
    engine.add(AddRequest("second", (*PROMPTS[2], 9), replace(GREEDY, max_tokens=1)))
    engine.step()
    nowhere = engine._runner._cache.nowhere
    changed = {
        slot for one, other in zip(keys, before, strict=True) for slot in (one != other).nonzero()[:, 0].tolist()
    }
    assert len({slot for slot in changed if slot < nowhere}) == 1  # the one new token


def test_medusa_drafts_no_more_tokens_than_it_has_heads():
    model = target()
    engine = make_engine("medusa", model, medusa_heads(model.config), k=8)
    deltas = run(engine, [AddRequest("it", PROMPTS[1], LONG)]).deltas["it"]
    assert max(delta.drafted for delta in deltas) == 4


@pytest.mark.parametrize("method", METHODS)
def test_kv_of_rejected_drafts_is_never_read(method):
    """What lies behind the texts' ends between two steps may be anything."""
    engine = make_engine(method)
    requests = [AddRequest(str(i), prompt, replace(GREEDY, ignore_eos=True)) for i, prompt in enumerate(PROMPTS)]
    expected = run(make_engine(method), requests)
    collector = Collector()
    for request in requests:
        engine.add(request)
    runner = engine._runner
    caches = [runner._cache, *([runner.proposer._cache] if method != "medusa" else [])]
    while engine.has_work:
        collector.take(engine.step().deltas)
        for cache, more in zip(caches, (0, 1), strict=False):
            kept = {
                block * 4 + offset
                for request in engine._scheduler.running
                for index, block in enumerate(request.blocks)
                for offset in range(4)
                if index * 4 + offset < request.computed + more * (request.pending == 1)
            }
            published = {block * 4 + offset for block in engine._prefixes._digest_of for offset in range(4)}
            spoilt = [slot for slot in range(cache.nowhere) if slot not in kept | published]
            for layer in cache.layers:
                for array in layer:
                    array[spoilt] = 1e3
    for request in requests:
        assert collector.deltas[request.request_id] == expected.deltas[request.request_id]
