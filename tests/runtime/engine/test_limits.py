"""At the engine's limits: waiting, or a clear error, never a lost block."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.runtime.engine.driver import MAX_MODEL_LEN, Collector, assert_all_free, make_engine, naive, run
from tests.runtime.tiny import VOCAB

from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.errors import BadRequest
from outrider_runtime.sampling.params import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
_random = random.Random(7)
PROMPTS = [tuple(_random.randrange(4, VOCAB) for _ in range(length)) for length in (1, 9, 30)]
PROMPTS += [(*PROMPTS[-1][:20], 20, 21), (11, 12, 13) * 6]


def test_a_thousand_at_once_on_an_engine_of_64_all_get_their_text_and_every_block_is_free_after():
    engine = make_engine("n-gram", concurrency=64, budget=256, blocks=100, overlap=True)
    requests = [
        AddRequest(str(number), PROMPTS[number % 2][: 1 + number % 5], replace(GREEDY, max_tokens=1 + number % 4))
        for number in range(1000)
    ]
    for request in requests:
        engine.add(request)
    for request in requests[::50]:
        engine.abort(request.request_id)
    collector, most = Collector(), 0
    while engine.has_work:
        output = engine.step()
        collector.take(output.deltas)
        most = max(most, output.stats.running)
    assert 32 < most <= 64
    for number, request in enumerate(requests):
        assert collector.finish_reason(request.request_id) == (None if number % 50 == 0 else "length")
        assert len(collector.tokens(request.request_id)) == (0 if number % 50 == 0 else 1 + number % 4)
    assert_all_free(engine)


@pytest.mark.parametrize("method", ["n-gram", "worse draft"])
def test_with_blocks_for_one_whole_context_all_come_to_their_end_one_after_another(method):
    engine = make_engine(method, blocks=MAX_MODEL_LEN // 4, prefix_caching=False)
    requests = [AddRequest(str(i), prompt, replace(GREEDY, max_tokens=200)) for i, prompt in enumerate(PROMPTS[:3])]
    collector = run(engine, requests)
    for request in requests:
        assert collector.text(request.request_id) == naive(request.prompt, request.params)
    assert_all_free(engine)


@pytest.mark.parametrize("max_tokens", [MAX_MODEL_LEN, 10_000, 2**62])
def test_more_tokens_than_the_context_holds_end_where_it_does(max_tokens):
    params = replace(GREEDY, max_tokens=max_tokens, min_tokens=min(max_tokens, 2**30))
    collector = run(make_engine("worse draft"), [AddRequest("it", PROMPTS[1], params)])
    assert collector.finish_reason("it") == "length"
    assert len(collector.tokens("it")) == MAX_MODEL_LEN - len(PROMPTS[1])


def test_what_is_refused_in_mid_run_disturbs_nobody():
    engine, collector = make_engine("n-gram"), Collector()
    good = [AddRequest(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    for request in good:
        engine.add(request)
        for prompt, params in [
            ((), GREEDY),
            ((5,) * MAX_MODEL_LEN, GREEDY),
            ((5,), replace(GREEDY, max_tokens=0)),
            ((5,), replace(GREEDY, bad_words=((VOCAB,),))),
        ]:
            with pytest.raises(BadRequest):
                engine.add(AddRequest("bad", prompt, params))
        collector.take(engine.step().deltas)
    run(engine, [], collector)
    for request in good:
        assert collector.text(request.request_id) == naive(request.prompt, request.params)
    assert_all_free(engine)
