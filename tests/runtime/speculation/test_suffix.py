"""The suffix method in an engine: what it drafts, from whom, when it waits for results, and what it remembers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.runtime.engine.driver import SUSPENDED, Collector, make_engine, naive, run
from tests.runtime.methods import METHODS, Method
from tests.runtime.tiny import VOCAB

from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.engine.request import Request
from outrider_runtime.engine.scheduler import Chunk
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.speculation.suffix import MOST_PATIENT, Suffix

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
REPETITIVE = replace(GREEDY, max_tokens=40, repetition_penalty=0.2)  # below 1 rewards repetition
ROUND = (11, 12, 13, 14, 15) * 8


def make(*, cached: int = 10_000, least: float = 0.2, **setting: Any) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        options = {"suffix_cache_tokens": cached, "suffix_min_probability": least}
        patch.setitem(METHODS, "suffix", Method("suffix", options=options))
        return make_engine("suffix", **setting)


def suffix_of(engine: Engine) -> Suffix:
    proposer = engine._runner.proposer
    assert isinstance(proposer, Suffix)
    return proposer


def counts(collector: Collector, name: str) -> tuple[int, int]:
    """Drafted and accepted."""
    deltas = collector.deltas[name]
    return sum(delta.drafted for delta in deltas), sum(delta.accepted for delta in deltas)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "one step behind"])
def test_what_repeats_is_drafted_from_itself(overlap):
    engine = make(k=6, overlap=overlap)
    collector = run(engine, [AddRequest("it", ROUND, REPETITIVE)])
    assert collector.text("it") == naive(ROUND, REPETITIVE)
    drafted, accepted = counts(collector, "it")
    assert accepted > 20
    assert accepted > 0.8 * drafted
    assert len(collector.deltas["it"]) < 20


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "one step behind"])
def test_an_answer_given_before_is_drafted_for_whoever_asks_again(overlap):
    engine = make(overlap=overlap)
    prompt = (5, 9, 17, 33)
    first, second = (counts(run(engine, [AddRequest(name, prompt, SAMPLED)]), name) for name in ("a", "b"))
    collector = run(engine, [AddRequest("c", prompt, SAMPLED)])
    assert collector.text("c") == naive(prompt, SAMPLED)
    assert second[1] > 28 > first[1]
    assert second[1] > 0.9 * second[0]


def test_with_nothing_kept_a_request_drafts_from_its_own_text_only():
    engine = make(cached=0)
    prompt = (5, 9, 17, 33)
    first, second = (counts(run(engine, [AddRequest(name, prompt, SAMPLED)]), name) for name in ("a", "b"))
    assert first == second


def test_a_prompt_is_nobody_elses():
    """Of a long prompt, which is all that the second request could repeat, nothing is drafted for it."""
    engine = make(k=8)
    prompt = tuple(range(4, VOCAB))
    short = replace(GREEDY, max_tokens=1)
    run(engine, [AddRequest("a", prompt, short)])
    suffix = suffix_of(engine)
    engine.add(AddRequest("b", prompt[:20], GREEDY))
    engine.step()
    (text,) = suffix._texts.values()
    assert not text.draft(8, 0.0).tokens


def test_a_request_that_wants_no_drafts_gets_none_and_its_output_helps_others():
    engine = make()
    prompt = (5, 9, 17, 33)
    plain = run(engine, [AddRequest("a", prompt, replace(SAMPLED, speculative=0))])
    assert counts(plain, "a") == (0, 0)
    assert counts(run(engine, [AddRequest("b", prompt, SAMPLED)]), "b")[1] > 28


def test_what_is_kept_is_bounded_and_what_runs_is_let_go_of():
    engine, short = make(cached=30), replace(GREEDY, max_tokens=8)
    suffix = suffix_of(engine)
    assert suffix._outputs is not None
    for turn in range(4):
        requests = [AddRequest(f"{turn}-{index}", (4 + turn, 5 + index), short) for index in range(2)]
        engine.add(AddRequest(f"{turn}-aborted", (7, 8, 9), short))
        engine.step()
        engine.abort(f"{turn}-aborted")
        run(engine, requests)
        assert suffix._outputs.size <= 30
    assert suffix._texts == suffix._chains == {}
    assert suffix._outputs.size > 10


def early_reads(engine: Engine) -> list[bool]:
    """Of each step to come, whether the one before was read first."""
    waits: list[bool] = []
    suffix = suffix_of(engine)
    awaits = suffix.awaits

    def watched(chunks: Any) -> bool:
        waits.append(awaits(chunks))
        return waits[-1]

    suffix.awaits = watched
    return waits


def test_where_nothing_matches_no_step_waits_for_results():
    engine = make(overlap=True, least=0.4)
    waits = early_reads(engine)
    never_twice = replace(GREEDY, max_tokens=40, repetition_penalty=50.0)
    collector = run(engine, [AddRequest("it", (5, 9), never_twice)])
    assert collector.text("it") == naive((5, 9), never_twice)
    assert len(waits) >= 40
    assert not any(waits)


def test_where_all_matches_every_step_waits_and_drafts():
    engine = make(k=4, overlap=True)
    waits = early_reads(engine)
    run(engine, [AddRequest("it", ROUND, REPETITIVE)])
    assert sum(waits) >= 7
    assert len(waits) < 20


def test_while_drafting_is_forbidden_no_step_waits_and_texts_are_followed():
    engine = make(overlap=True, policy=SUSPENDED)
    waits = early_reads(engine)
    collector = run(engine, [AddRequest("it", ROUND, REPETITIVE)])
    assert not any(waits)
    assert counts(collector, "it") == (0, 0)
    engine.set_policy(replace(SUSPENDED, mode="Enabled", state="Active"))
    assert counts(run(engine, [AddRequest("again", ROUND, REPETITIVE)]), "again")[1] > 25


def test_drafts_that_nobody_wants_are_offered_less_and_less_often():
    """As when drafting does not pay: what awaits the results is then not drafted."""
    suffix = Suffix(DeviceState(1, 64, 8, torch.device("cpu")), 4, None, 0.0)
    request = Request("it", len(ROUND), GREEDY, seed=0, tokens=[*ROUND], arrival=0.0, slot=0)
    chunk = Chunk(request, len(ROUND) - 1, 1, draft_length=4, decodes=True, samples=True)
    offers = []
    for step in range(300):
        if suffix.awaits([chunk]):
            assert suffix.most(chunk) == 4
            offers.append(step)
    gaps = [after - before for before, after in pairwise(offers)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 3
    assert gaps[-1] == MOST_PATIENT + 1
    suffix.most(chunk)
    suffix.send([chunk])  # wanted again
    assert suffix._drafts[0].tolist() == [11, 12, 13, 14]
    assert suffix.awaits([chunk]) or suffix.awaits([chunk])
