"""On a CUDA device the same code writes the same text: token by token in float32, by every method, in any batch."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest
import torch
from benchmarks.decode import synthetic
from tests.gpu.marks import ON_A_GPU, ON_HOPPER
from tests.runtime.engine.driver import assert_all_free, make_engine, naive, run
from tests.runtime.methods import METHODS
from tests.runtime.tiny import VOCAB, ours, reference_model

from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.sampling.noise import gumbel, random_words
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.speculation import greedy

pytestmark = ON_A_GPU

PROMPTS = [(4,), (5, 9, 33), (11, 12, 13, 14, 15) * 5, tuple(range(10, 50))]
PARAMS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0),
    "sampled": SamplingParams(max_tokens=24, seed=1, top_p=0.9, top_k=20),
    "penalties": SamplingParams(max_tokens=24, seed=4, frequency_penalty=1.0, repetition_penalty=1.1),
}


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def engine_on_device(method: str, **setting) -> Engine:
    return make_engine(method, target=ours(reference_model(), device="cuda"), **setting)


def requests(params: SamplingParams) -> list[AddRequest]:
    return [AddRequest(str(index), prompt, params) for index, prompt in enumerate(PROMPTS)]


def crowd() -> list[AddRequest]:
    """More than run at once, whose prompts are more than one step reads; some repeat themselves, as n-gram likes."""
    lots = random.Random(0)
    prompts = [tuple(lots.randrange(4, VOCAB) for _ in range(length)) for length in (1, 50, 3, 30, 9, 60, 2, 17, 41, 5)]
    prompts += [(11, 12, 13, 14, 15) * times for times in (2, 7, 12)]
    kinds = list(PARAMS.values())
    return [
        AddRequest(str(index), prompt, kinds[index % len(kinds)])
        for index, prompt in enumerate([*prompts, *reversed(prompts)])
    ]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("method", METHODS)
def test_a_text_is_what_the_naive_loop_on_the_cpu_writes(method, params):
    engine = engine_on_device(method, budget=16)
    collector = run(engine, requests(PARAMS[params]))
    for request in requests(PARAMS[params]):
        assert collector.text(request.request_id) == naive(request.prompt, request.params), request
    assert_all_free(engine)


@pytest.mark.parametrize("overlap", [True, False], ids=["one step behind", "in turn"])
@pytest.mark.parametrize("method", ["no speculation", "n-gram", "equal draft", "worse draft"])
def test_prompts_read_beside_drafts_change_no_text(method, overlap):
    """So steps of as many sampled rows have now more tokens, now fewer: each graph serves those of others."""
    engine = engine_on_device(method, budget=64, concurrency=12, blocks=300, overlap=overlap)
    collector = run(engine, crowd())
    for request in crowd():
        assert collector.text(request.request_id) == naive(request.prompt, request.params), request
    assert (engine.stats().accepted_tokens > 0) == (method != "no speculation")
    assert_all_free(engine)


def test_a_crowd_that_blocks_do_not_suffice_for_changes_no_text():
    engine = engine_on_device("worse draft", budget=64, concurrency=12, blocks=60)
    collector = run(engine, crowd())
    for request in crowd():
        assert collector.text(request.request_id) == naive(request.prompt, request.params), request
    assert_all_free(engine)


def test_in_bfloat16_an_equal_draft_is_nearly_always_accepted():
    target, draft = (ours(reference_model(), torch.bfloat16, "cuda") for _ in range(2))
    engine = make_engine("equal draft", target=target, draft=draft)
    run(engine, requests(PARAMS["sampled"]))
    stats = engine.stats()
    assert stats.accepted_tokens > 0.85 * stats.draft_tokens


@ON_HOPPER
def test_texts_are_the_same_whether_all_rows_are_computed_or_those_that_count(monkeypatch):
    target, draft = (synthetic("tiny", torch.bfloat16, "cuda") for _ in range(2))
    for parameter in draft.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.03 * parameter.std().item())
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = [request.prompt for request in crowd()]
    by_halves, calls = Mock(wraps=greedy.by_halves), []
    monkeypatch.setattr(greedy, "by_halves", by_halves)
    monkeypatch.setattr("outrider_runtime.kernels.tall.largest_pays", lambda rows, weight: True)
    texts = []
    for least in (1 << 30, 0):
        monkeypatch.setattr(greedy, "HALVED_ROWS", least)
        engine = make_engine("equal draft", target=target, draft=draft, concurrency=12, blocks=300)
        collector = run(engine, [AddRequest(str(index), prompt, params) for index, prompt in enumerate(prompts)])
        texts.append([collector.tokens(str(index)) for index in range(len(prompts))])
        calls.append(by_halves.call_count)
        stats = engine.stats()
        assert 0.1 * stats.draft_tokens < stats.accepted_tokens < 0.9 * stats.draft_tokens
    assert texts[0] == texts[1]
    assert calls[1] > calls[0] == 0


@pytest.mark.parametrize("method", ["n-gram", "random draft"])
def test_capturing_in_advance_and_between_requests_changes_no_text(method):
    engine = engine_on_device(method, budget=16)
    lines: list[str] = []
    engine.capture(lines.append)
    assert "captured" in lines[-1]
    more = True
    for name, params in PARAMS.items():
        collector = run(engine, requests(params))
        for request in requests(params):
            assert collector.text(request.request_id) == naive(request.prompt, request.params), name
        for _ in range(40):
            more = engine.idle()
    while more:
        more = engine.idle()
    collector = run(engine, requests(PARAMS["greedy"]))
    for request in requests(PARAMS["greedy"]):
        assert collector.text(request.request_id) == naive(request.prompt, request.params)
    assert_all_free(engine)


@pytest.mark.parametrize("method", ["no speculation", "n-gram", "equal draft"])
def test_log_probabilities_are_those_that_the_cpu_tells(method):
    asked = requests(SamplingParams(max_tokens=24, seed=1, logprobs=5))
    expected = run(make_engine(method), asked)
    collector = run(engine_on_device(method), asked)
    for request in asked:
        assert collector.tokens(request.request_id) == expected.tokens(request.request_id)
        told, right = (
            [each for delta in found.deltas[request.request_id] for each in delta.logprobs]
            for found in (collector, expected)
        )
        assert [each.logprob for each in told] == pytest.approx([each.logprob for each in right], abs=1e-3)
        for mine, theirs in zip(told, right, strict=True):
            assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-3)


def test_noise_is_the_same_on_both_devices():
    seeds, positions = torch.tensor([0, 1, -5, 2**62]), torch.tensor([0, 7, 4096, 1])
    words = [random_words(seeds.to(at), positions.to(at), 128_256).cpu() for at in ("cpu", "cuda")]
    noise = [gumbel(seeds.to(at), positions.to(at), 128_256).cpu() for at in ("cpu", "cuda")]
    assert torch.equal(*words)
    torch.testing.assert_close(*noise, rtol=1e-6, atol=1e-6)
