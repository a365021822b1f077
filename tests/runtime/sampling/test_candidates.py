"""Candidates are what the target may draw next, in the order of how likely it does, given its noise."""

from __future__ import annotations

import torch

from outrider_runtime.sampling.candidates import candidates
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.sampler import sample
from outrider_runtime.sampling.table import Mode, SamplingTable

VOCAB, ROWS = 50, 64


def given(temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, SamplingTable]:
    table = SamplingTable(torch.zeros(1, 1, dtype=torch.int32))
    table.write(0, SamplingParams(max_tokens=1, temperature=temperature), 7, 1)
    logits = 2 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    return logits, torch.zeros(ROWS, dtype=torch.int32), torch.arange(ROWS, dtype=torch.int32), table


def test_of_a_greedy_request_they_are_the_likeliest_with_their_probabilities():
    logits, slots, positions, table = given(0.0)
    for mode in (Mode.GREEDY, Mode.NOISE):
        tokens, confidences = candidates(logits, slots, positions, table, mode, 3)
        best = logits.log_softmax(-1).topk(3)
        assert torch.equal(tokens, best.indices.int())
        torch.testing.assert_close(confidences, best.values)


def test_the_first_is_what_a_target_of_the_same_logits_draws():
    logits, slots, positions, table = given(0.8)
    tokens, confidences = candidates(logits, slots, positions, table, Mode.NOISE, 3)
    assert torch.equal(tokens[:, 0], sample(logits, slots, positions, table, Mode.NOISE))
    assert (confidences <= 0).all()
    assert (confidences.diff(dim=1) <= 0).all()


def test_the_target_draws_one_of_several_more_often_than_it_draws_the_first():
    logits, slots, positions, table = given(1.0)
    off = logits + 0.5 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2))
    drawn = sample(off, slots, positions, table, Mode.NOISE).unsqueeze(1)
    hits = [(candidates(logits, slots, positions, table, Mode.NOISE, k)[0] == drawn).any(1).sum() for k in (1, 2, 4)]
    assert hits[0] < hits[1] < hits[2]
