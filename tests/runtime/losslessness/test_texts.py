"""No method changes a text: not its tokens, its end, nor its log-probabilities, however the engine's steps are made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.runtime.engine.driver import assert_all_free
from tests.runtime.losslessness.compare import compared
from tests.runtime.losslessness.plain import (
    behind_the_best,
    decoded,
    end,
    everything,
    generate,
    logits_of,
    plain,
    speaking,
    target,
)
from tests.runtime.losslessness.restless import Restless
from tests.runtime.methods import METHODS

from outrider_runtime.offline import Engine
from outrider_runtime.sampling.table import Mode, mode_of


def assert_drafted(engine: Engine, method: str) -> None:
    """Else the test has shown nothing."""
    assert (engine.stats().accepted_tokens > 0) == (method != "no speculation")


def test_plain_decoding_writes_what_whole_forwards_of_transformers_would():
    for request, completion in zip(everything(), plain(), strict=True):
        tokens = completion.token_ids
        assert max(behind_the_best(request, tokens)) == 0, request.name
        if not request.params.stop:
            assert completion.finish_reason == end(request, tokens), request.name


def test_plain_decodings_log_probabilities_are_those_of_transformers():
    for request, completion in zip(everything(), plain(), strict=True):
        if request.params.logprobs is None:
            assert completion.logprobs is None, request.name
            continue
        expected = logits_of(request, completion.token_ids).log_softmax(-1)
        for token, row, told in zip(completion.token_ids, expected, completion.logprobs, strict=True):
            best = row.topk(request.params.logprobs)
            assert told.logprob == pytest.approx(float(row[token]), abs=1e-5), request.name
            assert [id for id, _ in told.top] == best.indices.tolist(), request.name
            assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-5), request.name


def test_a_stop_string_ends_a_text_before_it():
    stopped = [(each, text) for each, text in zip(everything(), plain(), strict=True) if each.params.stop]
    whole = decoded([replace(each, params=replace(each.params, stop=())) for each, _ in stopped])
    assert len(stopped) > 5
    for (request, completion), uncut in zip(stopped, whole, strict=True):
        assert completion.finish_reason == "stop"
        assert uncut.text.startswith(completion.text + request.params.stop[0]), request.name
        assert request.params.min_tokens or request.params.stop[0] not in completion.text, request.name
        assert completion.token_ids == uncut.token_ids[: len(completion.token_ids)], request.name


@pytest.mark.parametrize("method", METHODS)
def test_in_batches_of_a_kind_and_with_prefix_hits(method):
    """A step draws for all of its requests by the way that the most demanding one needs."""
    engine = speaking(method, target=target(torch.float64), concurrency=16, blocks=400, budget=96, overlap=True)
    faults = []
    for mode in Mode:
        pairs = [pair for pair in zip(everything(), plain(), strict=True) if mode_of(pair[0].params) is mode]
        requests, texts = zip(*pairs, strict=True)
        faults += compared(requests, generate(engine, requests), texts).faults
    assert not faults
    assert engine.stats().prefix_cache_hits > 100
    assert_drafted(engine, method)
    assert_all_free(engine)


@pytest.mark.parametrize("method", METHODS)
def test_with_prompts_in_chunks_beside_drafts_of_changing_length_and_too_few_blocks(method):
    engine = speaking(
        method, Restless, target=target(torch.float64), budget=32, concurrency=8, blocks=36, k=6, overlap=True
    )
    assert not compared(everything(), generate(engine, everything()), plain()).faults
    assert engine.preempted
    assert_drafted(engine, method)
    assert_all_free(engine)


@pytest.mark.parametrize("method", METHODS)
def test_in_float32_and_a_step_at_a_time_only_near_ties_differ(method, record_property):
    engine = speaking(
        method, Restless, target=target(torch.float32), budget=12, concurrency=6, blocks=28, k=3, overlap=False
    )
    verdict = compared(everything(), generate(engine, everything()), plain(), rounded=True)
    assert not verdict.faults
    assert engine.preempted
    record_property("near ties in float32", (verdict.near, verdict.tokens))
