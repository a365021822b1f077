"""A step's drafts go where they are likeliest to stand, and fill the graphs they pay for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_runtime.speculation.allocation import Allocation, Captured, Offer, longest_captured
from outrider_runtime.speculation.cost import Grid

TOKENS, REQUESTS, LENGTHS = [1, 2, 4, 8, 12, 16, 24, 32, 64], [1, 2, 4, 8], [1, 2, 4]
CHANCES = np.array([0.8, 0.7, 0.6, 0.5])


def all_captured() -> Captured:
    return Captured.all(np.array(TOKENS), np.array(REQUESTS), np.array(LENGTHS))


def make_grid(per_token: float, per_turn: float) -> Grid:
    return Grid(
        target=1.0 + per_token * np.array(TOKENS),
        draft=per_turn * np.array(LENGTHS)[:, None] * (1.0 + 0.1 * np.array(REQUESTS)),
        attention=0.1,
        target_deviation=np.zeros(9),
        deviation=np.zeros((9, 3, 4)),
    )


def seconds(lengths: list[int], turns: int, grid: Grid, sizes: Sequence[int] = range(5)) -> float:
    drafts = sum(sizes[length] for length in lengths)
    tokens = next(index for index, bucket in enumerate(TOKENS) if bucket >= len(lengths) + drafts)
    took = float(grid.target[tokens]) + grid.attention
    drafting = sum(length > 0 for length in lengths)
    if drafting:
        bucket = next(index for index, size in enumerate(REQUESTS) if size >= drafting)
        took += float(grid.draft[LENGTHS.index(turns), bucket])
    return took


def expected(lengths: list[int], shifts: list[int]) -> float:
    total = 0.0
    for length, shift in zip(lengths, shifts, strict=True):
        odds = CHANCES / (1.0 - CHANCES) * np.exp(shift)
        total += 1.0 + float(np.cumprod(odds / (1.0 + odds))[:length].sum())
    return total


members = st.lists(st.tuples(st.integers(-3, 2), st.integers(0, 6)), min_size=1, max_size=8)


@given(members, st.sampled_from([0.001, 0.02, 0.1, 1.0]), st.sampled_from([0.0, 0.02, 0.2]))
def test_no_length_for_all_beats_the_offers_and_the_offers_are_what_they_say(members, per_token, per_turn):
    shifts, caps = [shift for shift, _ in members], [cap for _, cap in members]
    grid = make_grid(per_token, per_turn)
    allocation = Allocation(CHANCES, np.array(shifts, dtype=float), np.array(caps))
    offers = allocation.offers(grid, all_captured(), 4)
    for offer in offers:
        lengths = allocation.lengths(offer).tolist()
        assert all(length <= min(cap, offer.length) for length, cap in zip(lengths, caps, strict=True))
        assert sum(lengths) == offer.drafts
        assert sum(length > 0 for length in lengths) == offer.requests
        rate = expected(lengths, shifts) / seconds(lengths, offer.length, grid)
        assert rate == pytest.approx(offer.rate)
    best = max(offer.rate for offer in offers)
    for length in LENGTHS:
        uniform = [min(cap, length) for cap in caps]
        assert expected(uniform, shifts) / seconds(uniform, length, grid) <= best * (1 + 1e-9)


@given(members, st.sampled_from([(0, 2, 4, 5, 6), (0, 3, 7, 7, 7)]), st.sampled_from([0.001, 0.02, 0.3]))
def test_turns_of_trees_take_room_for_all_their_drafts(members, sizes, per_token):
    shifts, caps = [shift for shift, _ in members], [cap for _, cap in members]
    grid = make_grid(per_token, 0.02)
    allocation = Allocation(CHANCES, np.array(shifts, dtype=float), np.array(caps), np.diff(sizes))
    offers = allocation.offers(grid, all_captured(), 4)
    for offer in offers:
        lengths = allocation.lengths(offer).tolist()
        assert sum(sizes[length] for length in lengths) == offer.drafts
        assert expected(lengths, shifts) / seconds(lengths, offer.length, grid, sizes) == pytest.approx(offer.rate)
    assert len(offers) > 1 or not any(caps)


def test_who_is_likelier_to_be_right_drafts_more():
    allocation = Allocation(CHANCES, np.array([2.0, -3.0]), np.array([4, 4]))
    offers = allocation.offers(make_grid(1.0, 0.01), all_captured(), 4)
    good, bad = allocation.lengths(max(offers, key=lambda offer: offer.rate)).tolist()
    assert good > 0
    assert bad == 0


def test_a_graph_is_filled():
    allocation = Allocation(CHANCES, np.zeros(5), np.full(5, 4))
    [offer] = [offer for offer in allocation.offers(make_grid(1.0, 0.0), all_captured(), 1) if offer.length == 1]
    assert offer == Offer(1, pytest.approx((5 + 3 * 0.8) / 9.1), pytest.approx(9.1), drafts=3, requests=3)
    assert allocation.lengths(offer).tolist() == [1, 1, 1, 0, 0]


def test_only_captured_graphs_are_offered():
    captured = all_captured()
    captured.loops_ready[1, 2] = False  # two turns of up to four requests
    captured.tokens_ready[TOKENS.index(8)] = False
    offers = Allocation(CHANCES, np.zeros(3), np.full(3, 4)).offers(make_grid(0.001, 0.0), captured, 4)
    assert all(offer.length != 2 or offer.requests < 3 for offer in offers)
    assert longest_captured(captured, 3, 2) == 1
    assert longest_captured(captured, 3, 4) == 4
