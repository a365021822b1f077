"""Acceptance is read from verification as what it tells, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from outrider_runtime.speculation.acceptance import Acceptance


def verify(acceptance: Acceptance, chances: np.ndarray, drafted: int, steps: int, seed: int = 0, now: float = 0.0):
    """Steps of 10 ms; `chances` is [requests, positions], conditional."""
    random = np.random.default_rng(seed)
    requests = len(chances)
    for step in range(steps):
        stood = np.cumprod(random.random(chances.shape) < chances, axis=1).sum(axis=1)
        lengths = np.full(requests, drafted)
        acceptance.observe(np.arange(requests), lengths, np.minimum(stood, lengths), now + 0.01 * step, probe=False)


def test_positions_are_conditional_and_those_behind_a_rejection_unknown():
    acceptance = Acceptance(64, 4)
    verify(acceptance, np.tile([0.9, 0.5, 0.8, 0.3], (64, 1)), drafted=4, steps=100)
    assert acceptance.pooled() == pytest.approx([0.9, 0.5, 0.8, 0.3], abs=0.05)


def test_a_short_draft_says_nothing_of_the_positions_it_did_not_reach():
    acceptance = Acceptance(64, 4)
    verify(acceptance, np.tile([0.9, 0.9, 0.9, 0.9], (64, 1)), drafted=4, steps=50)
    verify(acceptance, np.tile([0.9, 0.1, 0.1, 0.1], (64, 1)), drafted=1, steps=50, now=0.5)
    assert acceptance.pooled() == pytest.approx([0.9, 0.9, 0.9, 0.9], abs=0.05)


def test_a_position_never_reached_takes_after_the_one_before():
    acceptance = Acceptance(64, 4)
    verify(acceptance, np.full((64, 4), 0.3), drafted=1, steps=100)
    assert acceptance.pooled() == pytest.approx([0.3] * 4, abs=0.1)


def test_positions_that_no_draft_got_to_lately_are_hoped_to_be_better_and_the_more_so_the_less_is_known():
    few, many, used = (Acceptance(64, 4) for _ in range(3))
    for acceptance, steps in ((few, 2), (many, 100), (used, 100)):
        verify(acceptance, np.full((64, 4), 0.5), drafted=4, steps=steps)
        verify(acceptance, np.full((64, 4), 0.5), drafted=4 if acceptance is used else 1, steps=40, now=steps / 100)
    assert used.hoped() == pytest.approx(used.pooled())
    for acceptance in (few, many):
        assert acceptance.hoped()[0] == acceptance.pooled()[0]
    hopes = [(acceptance.hoped() - acceptance.pooled())[1:] for acceptance in (few, many)]
    assert (hopes[0] > 1.5 * hopes[1]).all()
    assert (hopes[1] > 0.01).all()
    assert (hopes[0] < 0.15).all()


def test_one_probe_that_cannot_be_luck_is_enough():
    acceptance = Acceptance(4, 2)
    slots, ones = np.arange(4), np.ones(4, dtype=np.int64)
    for probe, stood in enumerate([[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]] * 4):
        acceptance.observe(slots, ones, np.array(stood), float(probe), probe=True)
    assert acceptance.pooled()[0] < 0.25
    acceptance.observe(slots, ones, ones, 13.0, probe=True)
    assert acceptance.pooled()[0] > 0.6


def test_equals_are_not_told_apart_by_luck():
    acceptance = Acceptance(32, 4)
    verify(acceptance, np.full((32, 4), 0.7), drafted=4, steps=200)
    assert np.abs(acceptance.shifts(np.arange(32))).max() < 0.4


def test_requests_that_differ_are_told_apart_and_a_new_one_is_as_the_pool():
    acceptance = Acceptance(33, 4)
    chances = np.repeat([[0.9], [0.2]], 16, axis=0) * np.ones(4)
    verify(acceptance, chances, drafted=4, steps=200)
    shifts = acceptance.shifts(np.arange(33))
    assert shifts[:16].min() > shifts[16:32].max() + 1.0
    assert shifts[32] == 0.0
    acceptance.forget(0)
    assert acceptance.shifts(np.array([0])) == pytest.approx([0.0])


@pytest.mark.parametrize(("requests", "within"), [(1, 40), (256, 2)])
def test_a_collapse_is_seen_in_as_few_steps_as_it_takes_to_be_sure(requests, within):
    acceptance = Acceptance(requests, 4)
    verify(acceptance, np.full((requests, 4), 0.9), drafted=4, steps=300)
    verify(acceptance, np.full((requests, 4), 0.1), drafted=4, steps=within, now=3.0)
    assert acceptance.pooled()[0] < 0.4


def test_nothing_drafted_is_nothing_learned():
    acceptance = Acceptance(4, 2)
    before = acceptance.pooled().tolist()
    acceptance.observe(np.arange(4), np.zeros(4, int), np.zeros(4, int), 1.0, probe=False)
    assert acceptance.pooled().tolist() == before
    assert acceptance.trials == 0
