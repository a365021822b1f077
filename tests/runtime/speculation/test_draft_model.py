"""When the draft model's forward runs, and over what: nothing while off, chunks to catch up, only if it repays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.runtime.engine.driver import ON, SUSPENDED, make_engine, naive, run
from tests.runtime.tiny import VOCAB, ours, reference_model, tiny_pair

from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.sampling.params import SamplingParams

PROMPT = tuple(range(4, 44))
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture
def forwards(monkeypatch) -> list[list[int]]:
    """Positions of each of the draft's forwards, in order."""
    seen: list[list[int]] = []
    forward = LlamaForCausalLM.forward

    def recorded(self, batch, cache):
        if self is not tiny_pair()[1]:
            seen.append(batch.positions.tolist())
        return forward(self, batch, cache)

    monkeypatch.setattr(LlamaForCausalLM, "forward", recorded)
    return seen


def test_a_prompt_is_read_by_the_draft_as_the_target_reads_it(forwards):
    engine = make_engine("random draft", budget=16)
    engine.add(AddRequest("it", PROMPT, PARAMS))
    for _ in range(3):
        engine.step()
    assert forwards == [list(range(16)), list(range(16, 32)), list(range(32, 40))]


def test_a_decode_step_is_one_forward_for_each_drafted_token_the_first_of_two(forwards):
    engine = make_engine("random draft", k=3)
    engine.add(AddRequest("it", PROMPT, PARAMS))
    engine.step()
    forwards.clear()
    engine.step()
    assert forwards == [[39, 40], [41], [42]]


def test_nothing_of_the_draft_runs_while_suspended_or_refused_by_the_request(forwards):
    engine = make_engine("random draft", policy=SUSPENDED)
    run(engine, [AddRequest("it", PROMPT, PARAMS)])
    engine.set_policy(ON)
    run(engine, [AddRequest("it", (9, *PROMPT), replace(PARAMS, speculative=0))])
    assert forwards == []


def test_after_a_pause_it_catches_up_in_chunks_of_the_budget(forwards):
    engine = make_engine("random draft", budget=16, k=2, policy=SUSPENDED)
    engine.add(AddRequest("it", PROMPT, PARAMS))
    for _ in range(4):
        engine.step()
    engine.set_policy(ON)
    drafted = [engine.step().deltas[0].drafted for _ in range(3)]
    assert forwards[:2] == [list(range(16)), list(range(16, 32))]
    assert forwards[2][0] == 32
    assert drafted[:2] == [0, 0]
    assert drafted[2] == 2


def test_a_cached_prefix_is_taken_over_as_far_as_the_draft_has_read_it(forwards):
    engine = make_engine("random draft", k=2)
    run(engine, [AddRequest("a", PROMPT[:20], replace(PARAMS, max_tokens=1))])
    engine.set_policy(SUSPENDED)
    run(engine, [AddRequest("b", PROMPT, replace(PARAMS, max_tokens=1))])  # longer, without the draft
    engine.set_policy(ON)
    forwards.clear()
    engine.add(AddRequest("c", (*PROMPT, 50), PARAMS))
    assert engine.step().deltas[0].cached_tokens == 40
    assert forwards == [list(range(20, 41))]


def test_what_was_caught_up_in_a_shared_block_serves_the_next(forwards):
    engine = make_engine("random draft", k=2, policy=SUSPENDED)
    run(engine, [AddRequest("a", PROMPT, replace(PARAMS, max_tokens=1))])
    engine.set_policy(ON)
    run(engine, [AddRequest("b", PROMPT, replace(PARAMS, max_tokens=1))])
    forwards.clear()
    engine.add(AddRequest("c", PROMPT, PARAMS))
    engine.step()
    assert forwards == [list(range(36, 40))]


def test_it_drafts_no_further_than_its_own_context_reaches(forwards):
    draft = tiny_pair(1)[1]
    short = replace(draft.config, max_position_embeddings=50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "config", short)
        engine = make_engine("random draft", k=4, draft=draft)
        collector = run(engine, [AddRequest("it", PROMPT, PARAMS)])
    assert max(position for positions in forwards for position in positions) < 50
    assert len(collector.tokens("it")) == 40


def test_a_draft_with_fewer_ids_serves_texts_that_hold_others():
    narrow = ours(reference_model(seed=1, vocab_size=VOCAB - 9))
    engine = make_engine("random draft", draft=narrow)
    params = replace(PARAMS, repetition_penalty=1.2, min_tokens=30, stop_token_ids=(VOCAB - 2,))
    prompt = (VOCAB - 1, *PROMPT, VOCAB - 3)
    assert run(engine, [AddRequest("it", prompt, params)]).text("it") == naive(prompt, params)
    assert engine.stats().draft_tokens > 0
