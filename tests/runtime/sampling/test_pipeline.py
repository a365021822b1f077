"""Each row is drawn for itself, by the one rule. That draws follow their distribution is held in ../losslessness."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.sampling.distribution import CASES, EOS, GREEDY, LOGITS, PLAIN, TEXT, VOCAB

from outrider_runtime.sampling.noise import gumbel
from outrider_runtime.sampling.pipeline import Row, sample


def test_the_token_is_the_one_that_maximises_log_probability_and_noise():
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [Row(PLAIN, 7, list(range(1, 2 + index)), 1) for index in range(50)]
    noise = gumbel(torch.full((50,), 7), torch.tensor([row.position for row in rows]), VOCAB)
    assert torch.equal(sample(logits, rows), (logits.log_softmax(-1) + noise).argmax(-1))


def test_greedy_takes_the_likeliest_whatever_top_k_and_top_p_say():
    logits = torch.tensor([LOGITS])
    best = max(range(VOCAB), key=lambda token: LOGITS[token])
    for params in (GREEDY, replace(GREEDY, top_k=3), replace(GREEDY, top_p=0.1, seed=3)):
        assert sample(logits, [Row(params, 3, TEXT, 3)]).tolist() == [best]


@pytest.mark.parametrize(
    "params", [replace(PLAIN, top_k=2), replace(PLAIN, top_p=0.6), replace(PLAIN, top_p=0.0, top_k=3)]
)
def test_equals_stay_or_go_together(params):
    """Whatever order a sort leaves them in: a device's, or a batch's."""
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0]]).expand(60, -1)
    rows = [Row(params, seed, TEXT, 3) for seed in range(60)]
    assert set(sample(logits, rows).tolist()) == {1, 3, 4}


@pytest.mark.parametrize("temperature", [1e-5, 1e-9, 1e-300])
def test_next_to_no_temperature_is_greedy(temperature):
    logits = torch.tensor([LOGITS]).expand(50, -1)
    rows = [Row(replace(PLAIN, temperature=temperature, top_p=0.9), seed, TEXT, 3) for seed in range(50)]
    assert set(sample(logits, rows).tolist()) == {max(range(VOCAB), key=lambda token: LOGITS[token])}


def test_ids_beyond_the_vocabulary_do_not_matter():
    """As a draft with fewer ids than its target meets them."""
    params = replace(GREEDY, repetition_penalty=1.1, min_tokens=9, stop_token_ids=(3, VOCAB, VOCAB + 7))
    more, same = Row(params, 0, [*TEXT, VOCAB + 1], 3), Row(params, 0, TEXT, 3)
    logits = torch.tensor([LOGITS])
    assert sample(logits, [more], EOS).tolist() == sample(logits, [same], EOS).tolist()


def test_penalties_see_the_drafts_before_a_position():
    """The likeliest token is drafted once: behind that draft it is penalised, before it not."""
    logits = torch.tensor([[3.0, 2.0, 1.0]]).expand(2, -1)
    params = replace(GREEDY, presence_penalty=1.5)
    rows = [Row(params, 0, [2], 1, drafted) for drafted in ([], [0])]
    assert sample(logits, rows).tolist() == [0, 1]


def test_logits_are_left_as_they_were():
    logits = torch.tensor([LOGITS, LOGITS])
    before = logits.clone()
    sample(logits, [Row(CASES["penalties"], 1, TEXT, 3), Row(CASES["min_tokens"], 1, TEXT, 3)], EOS)
    assert torch.equal(logits, before)


rows_of_any_kind = st.builds(
    Row,
    params=st.sampled_from([*CASES.values(), GREEDY, replace(GREEDY, frequency_penalty=1.0)]),
    seed=st.integers(-(2**70), 2**70),
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=9),
    prompt_length=st.just(2),
    drafted=st.lists(st.integers(0, VOCAB - 1), max_size=3),
)


@settings(max_examples=60)
@given(rows=st.lists(rows_of_any_kind, min_size=1, max_size=6), at_once=st.sampled_from([1, 30, 1 << 23]))
def test_no_row_depends_on_its_neighbours(rows, at_once):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider_runtime.sampling.pipeline.LOGITS_AT_ONCE", at_once)
        together = sample(logits, rows, EOS).tolist()
    alone = [int(sample(logits[index : index + 1], [row], EOS)) for index, row in enumerate(rows)]
    assert together == alone
