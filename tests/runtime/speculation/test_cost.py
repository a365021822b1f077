"""Step times are known from a few measured steps, and better from every step since."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.runtime.speculation.simulated import (
    LENGTHS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    make_table,
    padded,
    true_seconds,
)

from outrider_runtime.speculation.cost import CONFIRMED, DOUBTED_SECONDS, CostTable, StepShape


def decode(count: int, length: int, context: int = 256) -> StepShape:
    tokens = count * (1 + length)
    drafting = count if length else 0
    return StepShape(tokens, tokens, count * context, drafting, length, drafting * context)


SHAPES = [
    decode(count, length)
    for count in (1, 4, 16, 50, 64, 100, 128, 200, 256)
    for length in (0, *LENGTHS)
    if count * (1 + length) <= TOKEN_BUCKETS[-1]
]
STEP = decode(64, 2)


def make_table_of(shapes: Sequence[StepShape]) -> tuple[CostTable, list[float]]:
    """That has seen these, and the seconds they take."""
    table = make_table()
    for shape in shapes:
        learn(table, shape, table.seconds(shape), times=20)
    return table, [table.seconds(shape) for shape in shapes]


def learn(table: CostTable, shape: StepShape, seconds: float, times: int = 1, now: float = 10.0) -> None:
    for index in range(times):
        table.observe(shape, seconds, now + 0.01 * index)


@pytest.mark.parametrize("model", [True, False])
def test_eight_points_tell_the_time_of_every_other_step_within_a_tenth(model):
    table = make_table(model=model)
    assert len(table.calibration(256, 2048)) <= 8
    worst = max(abs(table.seconds(shape) / true_seconds(shape, model=model) - 1.0) for shape in SHAPES)
    assert worst < 0.1


@pytest.mark.parametrize("points", [[], [(STEP, 0.01)] * 9, [(STEP, 0.0)], [(STEP, math.nan)]])
def test_points_that_tell_nothing_are_refused(points):
    with pytest.raises(ValueError, match="1 to 8 points of positive seconds"):
        make_table(fit=False).fit(points)


def test_nothing_is_known_before_a_fit():
    table = make_table(fit=False)
    learn(table, STEP, 0.01)
    assert not table.known
    with pytest.raises(RuntimeError, match="has not been fitted"):
        table.seconds(STEP)


def test_one_point_is_enough_to_begin_with():
    table = make_table(fit=False)
    table.fit([(STEP, 0.0123)])
    assert table.seconds(STEP) == pytest.approx(0.0123, rel=0.02)


def test_a_graph_slower_than_thought_is_learned_and_its_neighbours_suspected():
    table = make_table()
    before = {count: table.seconds(decode(count, 0)) for count in (1, 80, 96, 128)}
    slower = 1.15 * before[96]
    learn(table, decode(96, 0), slower, times=40)
    assert table.seconds(decode(96, 0)) == pytest.approx(slower, rel=0.02)
    assert table.seconds(decode(80, 0, 307)) == pytest.approx(slower, rel=0.02)  # padded to the same graph
    assert 1.0 < table.seconds(decode(128, 0)) / before[128] < 1.1
    assert table.seconds(decode(1, 0)) == pytest.approx(before[1], rel=0.03)


def test_a_slow_draft_loop_is_told_from_the_target_that_is_known():
    table = make_table()
    shape, plain = decode(16, 4), decode(80, 0)
    before = table.seconds(plain)
    learn(table, plain, before, times=40)
    learn(table, shape, table.seconds(shape) + 0.001, times=40)
    assert table.seconds(plain) == pytest.approx(before, rel=0.02)
    assert table.seconds(decode(16, 6)) > make_table().seconds(decode(16, 6)) + 0.0005  # the same graph, more often


def test_a_stall_is_no_lesson_but_one_that_stays_is():
    table = make_table()
    learn(table, STEP, table.seconds(STEP), times=20)
    before = table.seconds(STEP)
    learn(table, STEP, 20 * before)
    assert table.seconds(STEP) == before
    learn(table, STEP, before)
    learn(table, STEP, 20 * before, times=CONFIRMED - 1)
    assert table.seconds(STEP) == pytest.approx(before, rel=0.02)
    learn(table, STEP, before)
    learn(table, STEP, 1.5 * before, times=60)
    assert table.seconds(STEP) == pytest.approx(1.5 * before, rel=0.05)


def test_a_sudden_change_is_examined_until_it_has_proved_lasting():
    table = make_table()
    learn(table, STEP, table.seconds(STEP), times=20)
    before, now, kept = table.seconds(STEP), 10.0, []
    for _ in range(3):
        learn(table, STEP, 2.0 * before, times=20, now=now)
        assert table.seconds(STEP) > 1.5 * before
        changed = now
        while table.seconds(STEP) > 1.5 * before:
            now += 0.05
            learn(table, decode(1, 0), table.seconds(decode(1, 0)), now=now)
        kept.append(now - changed)
    assert kept == pytest.approx([DOUBTED_SECONDS, 2 * DOUBTED_SECONDS, 4 * DOUBTED_SECONDS], abs=0.06)
    learn(table, STEP, before, now=now)  # it is as it was: another change is doubted as the first was
    learn(table, STEP, 2.0 * before, times=20, now=now)
    learn(table, STEP, 2.0 * before, now=now + 1.5 * DOUBTED_SECONDS)
    assert table.seconds(STEP) < 1.5 * before


@pytest.mark.parametrize(
    ("seen", "change", "within"), [(0, 1.5, 0.05), (200, 1.08, 0.01)], ids=["of a graph that has never run", "small"]
)
def test_news_that_is_no_sudden_change_is_learned_and_not_examined(seen, change, within):
    table = make_table()
    learn(table, STEP, table.seconds(STEP), times=seen)
    before = table.seconds(STEP)
    learn(table, STEP, change * before, times=CONFIRMED + 10)
    learn(table, decode(1, 0), table.seconds(decode(1, 0)), now=10.0 + 2 * DOUBTED_SECONDS)
    assert table.seconds(STEP) == pytest.approx(change * before, rel=within)


def test_what_steps_with_prompts_take_beyond_their_parts_is_no_change_of_those_without():
    """Prompts pay for attention among themselves, which the parts do not hold; they go through the same graphs."""
    table = make_table()
    mixed = replace(decode(64, 0), tokens=STEP.tokens, prompt_tokens=STEP.tokens - 64)
    learn(table, STEP, table.seconds(STEP), times=50)
    before = table.seconds(STEP)
    for now in (10.0, 10.0 + 2 * DOUBTED_SECONDS):
        learn(table, mixed, 1.3 * table.seconds(mixed), times=2, now=now)
        learn(table, STEP, before, times=2, now=now)
    assert table.seconds(STEP) == pytest.approx(before, rel=0.03)


def test_a_lasting_change_is_examined_less_often_though_the_graphs_that_had_no_part_in_it_are_as_they_were():
    table = make_table()
    shape, plain = STEP, decode(192, 0)  # through the target's same graph
    before, unchanged, now, examined = table.seconds(shape), table.seconds(plain), 10.0, []
    while now < 20.0:
        if table.seconds(shape) < 1.2 * before:
            examined.append(now)
            learn(table, shape, 2.0 * before, times=CONFIRMED, now=now)
        learn(table, plain, unchanged, now=now)
        now += 0.02
    assert len(examined) <= 1 + math.log2(10.0 / DOUBTED_SECONDS)


def test_what_has_changed_alike_in_two_graphs_has_changed_in_all_and_stays():
    table, before = make_table_of(shapes := (STEP, decode(4, 1), decode(200, 0)))
    learn(table, STEP, 2.0 * before[0], times=CONFIRMED)
    learn(table, shapes[1], 2.0 * before[1], times=2)
    for _ in range(2):
        assert [table.seconds(shape) for shape in shapes] == pytest.approx([2.0 * each for each in before], rel=0.01)
        learn(table, STEP, 2.0 * before[0], now=10.0 + 2 * DOUBTED_SECONDS)
    assert table.seconds(shapes[2], hope=1.0) < 1.2 * before[2]  # which was not seen to: worth a trial
    assert table.seconds(STEP, hope=1.0) > 1.9 * before[0]


def test_graphs_that_stayed_as_they_were_do_not_make_a_change_one_of_all():
    table, before = make_table_of(shapes := (STEP, decode(4, 1), decode(200, 0)))
    learn(table, STEP, 2.0 * before[0], times=CONFIRMED + 5)
    for shape, seconds in zip(shapes[1:], before[1:], strict=True):
        learn(table, shape, 1.001 * seconds, times=5)
    seconds = [table.seconds(shape) for shape in shapes]
    assert seconds == pytest.approx([2.0 * before[0], *before[1:]], rel=0.1)


def test_a_miss_that_stays_is_not_taken_for_noise():
    """In which what comes after it would be lost."""
    table = make_table()
    before = table.seconds(STEP)
    for stretch in (1.12, 1.24, 1.36, 1.48):  # each too little to be sudden
        learn(table, STEP, stretch * before, times=3)
    assert table.seconds(STEP) == pytest.approx(1.48 * before, rel=0.04)


def test_what_was_put_aside_before_a_fit_does_not_come_back_after_it():
    table, fitted = make_table(), make_table()
    table.fit([(decode(1, 0), 0.02)])
    learn(table, STEP, 1.3 * table.seconds(STEP), times=40)
    learn(table, STEP, 2.0 * table.seconds(STEP), times=20)
    table.fit([(shape, true_seconds(shape)) for shape in table.calibration(256, 2048)])
    plain = decode(1, 0)
    learn(table, plain, table.seconds(plain), now=10.0 + 2 * DOUBTED_SECONDS)
    assert table.seconds(STEP) == pytest.approx(fitted.seconds(STEP), rel=0.01)
    now, changed = 20.0, 2.0 * table.seconds(STEP)
    learn(table, STEP, 0.5 * changed, now=now)
    learn(table, STEP, changed, times=20, now=now)
    learn(table, plain, table.seconds(plain), now=now + 1.5 * DOUBTED_SECONDS)  # doubted as a first one is
    assert table.seconds(STEP) < 0.75 * changed


def test_no_noise_makes_a_step_take_no_time():
    table = make_table()
    lots = np.random.default_rng(0)
    for index in range(300):
        shape, factor = SHAPES[lots.integers(len(SHAPES))], float(np.exp(2.0 * lots.standard_normal()))
        learn(table, shape, true_seconds(shape) * factor, times=CONFIRMED, now=10.0 + 0.1 * index)
        assert all(table.seconds(each, hope) > 0.0 for each in SHAPES for hope in (0.0, 1.0))
    grid = table.grid(0, 4096, 256.0)
    assert grid.target.min() > 0.0 < grid.draft.min()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(seconds):
    table = make_table()
    before = table.seconds(STEP)
    learn(table, STEP, seconds, times=3)
    assert table.seconds(STEP) == before


def test_what_was_learned_fades_to_what_was_measured():
    table = make_table()
    measured = table.seconds(STEP)
    learn(table, STEP, 1.2 * measured, times=50)
    learn(table, decode(1, 0), table.seconds(decode(1, 0)), now=1000.0)
    assert table.seconds(STEP) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize("prompt_tokens", [0, 100])
def test_the_grid_says_what_single_steps_do(model, prompt_tokens):
    table = make_table(model=model)
    grid = table.grid(prompt_tokens, 64 * 300, 300.0)
    for length in LENGTHS:
        rows = 64 * (1 + length)
        tokens = padded(TOKEN_BUCKETS, rows + prompt_tokens)
        shape = StepShape(tokens, tokens - prompt_tokens, 64 * 300, 64, length, 64 * 300, 0, prompt_tokens)
        parts = grid.target[TOKEN_BUCKETS.index(tokens)] + grid.attention
        parts += grid.draft[LENGTHS.index(length), REQUEST_BUCKETS.index(64)]
        assert parts == pytest.approx(table.seconds(shape), rel=1e-6)
