"""Log-probabilities are those of the target's own forward over the text, however the tokens were come by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.runtime.engine.driver import Collector, make_engine, naive, run
from tests.runtime.tiny import VOCAB, tiny_pair

from outrider_runtime.engine.messages import AddRequest, TokenLogprobs
from outrider_runtime.sampling.params import MAX_LOGPROBS, SamplingParams

_random = random.Random(3)
PROMPTS = [tuple(_random.randrange(4, VOCAB) for _ in range(length)) for length in (1, 26)]
PARAMS = [
    SamplingParams(max_tokens=14, temperature=0.0, logprobs=3),
    SamplingParams(max_tokens=14, seed=1, logprobs=0, temperature=2.0, logit_bias=((7, 3.0),)),
    SamplingParams(max_tokens=30, seed=2, logprobs=MAX_LOGPROBS, stop_token_ids=tuple(range(20, 30))),
    SamplingParams(max_tokens=14, seed=3, top_p=0.5, frequency_penalty=1.0, bad_words=((8,), (9, 10))),
]


def requests(params: Sequence[SamplingParams] = PARAMS) -> list[AddRequest]:
    return [
        AddRequest(f"{name}-{index}", prompt, each)
        for index, prompt in enumerate(PROMPTS)
        for name, each in enumerate(params)
    ]


def told(collector: Collector, request: AddRequest) -> list[TokenLogprobs]:
    deltas = collector.deltas[request.request_id]
    assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in deltas)
    return [each for delta in deltas for each in delta.logprobs or ()]


def assert_the_targets(collector: Collector, request: AddRequest) -> None:
    tokens = collector.tokens(request.request_id)
    reference, _ = tiny_pair()
    with torch.inference_mode():
        logits = reference(torch.tensor([[*request.prompt, *tokens]])).logits[0, len(request.prompt) - 1 : -1]
    expected = logits.double().log_softmax(-1)
    for token, row, each in zip(tokens, expected, told(collector, request), strict=True):
        assert each.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert len(each.top) == request.params.logprobs
        values = [value for _, value in each.top]
        assert values == pytest.approx(row.topk(len(values)).values.tolist(), abs=1e-4)
        assert values == pytest.approx([float(row[id]) for id, _ in each.top], abs=1e-4)
        assert len({id for id, _ in each.top}) == len(values)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "one step behind"])
@pytest.mark.parametrize("method", ["no speculation", "n-gram", "worse draft"])
def test_they_are_the_targets_also_of_accepted_drafts(method, overlap):
    engine = make_engine(method, overlap=overlap, budget=24)
    collector = run(engine, requests())
    for request in requests():
        assert collector.text(request.request_id) == naive(request.prompt, request.params)
        if request.params.logprobs is None:
            assert all(delta.logprobs is None for delta in collector.deltas[request.request_id])
        else:
            assert_the_targets(collector, request)


def test_they_change_no_text():
    asked, unasked = requests(PARAMS[:3]), requests([replace(params, logprobs=None) for params in PARAMS[:3]])
    collectors = [run(make_engine("worse draft"), batch) for batch in (asked, unasked)]
    for request in asked:
        assert collectors[0].text(request.request_id) == collectors[1].text(request.request_id)


def test_they_outlive_a_preemption():
    engine = make_engine("equal draft", blocks=26, prefix_caching=False)
    batch = [replace(request, params=replace(request.params, max_tokens=50, ignore_eos=True)) for request in requests()]
    collector = run(engine, batch)
    for request in batch:
        if request.params.logprobs is not None:
            assert_the_targets(collector, request)
