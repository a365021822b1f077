"""The benchmark's pairs agree as often as they are asked to, through the real engine, and its sums are right."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from benchmarks.adaptive import (
    QUICK,
    SHAPES,
    Step,
    concurrency_at,
    least_squares,
    main,
    make_site,
    measure,
    parse,
    plain_seconds,
    right_lengths,
    seconds_until_right,
)
from benchmarks.agreement import MATCH, Circle, build, prompt
from tests.runtime.engine.driver import run

from outrider_runtime.config import HEADS
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.sampling.params import SamplingParams

TINY = [
    *("--shape", "tiny", "--device", "cpu", "--levels", "1", "2", "--fixed", "1", "--num-speculative-tokens", "2"),
    *("--input", "8", "--output", "160", "--copied", "96", "--max-batched-tokens", "64"),
    *("--window", "0.02", "--settle", "2", "--hold", "0.6", "--step-concurrency", "2", "--step-seconds", "0.2"),
    *("--acceptances", "0.2", "0.9"),
]
VOCAB = 512


@pytest.fixture(scope="module")
def circle() -> Circle:
    return Circle(VOCAB)


@pytest.fixture(scope="module")
def target(circle):
    return build(SHAPES["tiny"], circle, torch.float32, "cpu", seed=0)


def test_the_circle_holds_every_token_once(circle):
    assert sorted(circle.walk(5, VOCAB).tolist()) == list(range(VOCAB))


@pytest.mark.parametrize("agreement", [0.0, 0.25, 0.75, 1.0])
def test_behind_the_asked_share_of_tokens_a_draft_says_what_the_target_says(circle, agreement):
    same = circle.before(agreement) == circle.before(1.0)
    assert abs(float(same.float().mean()) - agreement) < 0.01
    copied = circle.copy(9, VOCAB, agreement) == circle.walk(9, VOCAB)
    assert abs(copied.mean() - agreement) < 0.01


def test_a_target_goes_on_in_the_circle(circle, target):
    site = make_site(parse(TINY), "tiny", target, circle)
    request = AddRequest("it", prompt(circle, 3, 8), SamplingParams(max_tokens=60, temperature=0.0))
    assert list(run(site.engine, [request]).tokens("it")) == circle.walk(3 * 7919 + 8, 60).tolist()


@pytest.mark.parametrize("pair", ["tiny", "ngram", *HEADS])
def test_drafts_stand_as_often_as_asked_and_at_once_when_that_changes(circle, target, pair):
    site = make_site(parse(TINY), pair, target, circle)
    for acceptance in (0.25, 0.75):
        measured = measure(site, site.texts(acceptance, 160), 2, 1, 60)
        assert measured.agreement == pytest.approx(acceptance, abs=0.15)


def test_a_prompt_to_copy_ends_as_it_begins_and_holds_what_follows(circle, target):
    site = make_site(parse(TINY), "ngram", target, circle)
    whole = site.texts(1.0, 20)(4).prompt
    assert whole[:MATCH] == whole[-MATCH:]
    assert list(whole[:-MATCH]) == circle.walk(4 * 7919, MATCH + 20).tolist()


def test_a_run_prints_a_row_for_each_thing_measured(capsys, tmp_path):
    file = tmp_path / "rows.json"
    main([*TINY, "--pair", "tiny", "--json", str(file)])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kind"] for row in rows] == ["level", "level", "ramp", "step", "step"]
    assert [row["kind"] for row in json.loads(file.read_text())] == [row["kind"] for row in rows]
    for row in rows[:2]:
        assert row["fixed"].keys() == {"1"}
        best = max(row["plain"], *row["fixed"].values())
        assert row["ratio"] == pytest.approx(row["adaptive"] / best, abs=0.01)
    assert [(row["from"], row["to"]) for row in rows[3:]] == [(0.2, 0.9), (0.9, 0.2)]


def test_a_quick_run_has_fewer_levels_unless_others_are_given():
    assert parse(["--quick"]).levels == QUICK["levels"]
    given = parse(["--quick", "--levels", "2"])
    assert (given.levels, given.parts) == ([2], ["levels"])


@pytest.mark.parametrize(
    ("second", "concurrency"),
    [(0.0, 1), (0.5, 2), (1.0, 4), (1.5, 10), (2.0, 16), (3.0, 4), (3.5, 2), (4.0, 1), (9, 1)],
)
def test_a_ramp_goes_straight_from_each_level_to_the_next(second, concurrency):
    assert concurrency_at(second, [1, 4, 16, 4, 1], 1.0) == concurrency


def test_what_is_done_counts_by_the_time_that_plain_decoding_takes_for_it():
    def step(at: float, requests: int, each: int, read: int) -> Step:
        return Step(at, requests * each, each, read, 0.0)

    lots, plain, now = random.Random(0), [], 0.0
    for _ in range(400):
        requests, read = lots.randrange(1, 64), lots.choice([0, 0, 300])
        now += 0.004 + 20e-6 * requests + 30e-6 * read
        plain.append(step(now, requests, 1, read))
    seconds = plain_seconds(plain)
    assert seconds([step(0.0, 10, 3, 100)]) == pytest.approx(3 * 0.004 + 30 * 20e-6 + 100 * 30e-6, rel=0.05)
    assert seconds(plain) == pytest.approx(now, rel=0.02)


def test_no_factor_is_negative():
    factors = least_squares(np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 1.5, 1.0]))
    assert factors == pytest.approx([1.5, 0.0])


def test_lengths_within_two_percent_of_the_best_are_right():
    assert right_lengths({0: 100.0, 1: 150.0, 2: 198.0, 4: 200.0, 8: 190.0}) == [2, 4]


@pytest.mark.parametrize(
    ("lengths", "seconds"),
    [
        ([4, 4, 4, 4], 0.0),
        ([0, 0, 4, 4], 0.2),
        ([4, 4.4, 2.2, 3.0], 0.0),
        ([0, 4, 0, 4], 0.3),
        ([4, 4, 4, 0], None),
        ([6, 5, 4.4, 4], 0.2),
    ],
    ids=["from the start", "after two", "between two right ones", "not before it stays", "never", "half a token off"],
)
def test_a_length_is_right_from_when_on_it_stays_near_one_of_the_right_ones(lengths, seconds):
    told = [(0.1 * bucket + 0.02 + 0.04 * step, value) for bucket, value in enumerate(lengths) for step in range(2)]
    assert seconds_until_right(told, [2, 4]) == seconds
