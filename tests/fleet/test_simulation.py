"""Outrider beside an oracle under changing load, in simulated time; benchmarks/fleet.py is the same at full length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fleet import loads
from tests.fleet.costs import Costs
from tests.fleet.drivers import Hpa, Oracle, Outrider
from tests.fleet.simulation import Moment, Result, run
from tests.operator.build import DRAFTED, spec

TARGET, WINDOW = 10, 30.0
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "fleet.json"
LOADS = (
    loads.step(at=200, until=700, seconds=1100),
    loads.spike(every=300, seconds=650),
    loads.flapping(seconds=600),
)


@pytest.mark.parametrize("load", LOADS, ids=[load.name for load in LOADS])
def test_outrider_comes_near_the_oracle_and_neither_swings_nor_runs_away(load):
    scaling = spec(DRAFTED).autoscaling
    ours = run(load, Outrider(DRAFTED))
    best = run(load, Oracle(scaling, load, Costs(), 0.7, 4))
    assert ours.goodput >= 0.85 * best.goodput  # short loads are mostly the rush; the benchmark holds 0.9
    assert ours.oscillations(WINDOW) == []
    assert ours.runaways(TARGET) == []
    assert ours.resaturations() == []


def test_at_the_limit_of_its_replicas_turning_speculation_off_serves_what_would_be_lost():
    load = loads.Load("full", 600.0, 30.0, lambda now: 30.0 if now >= 60 else 10.0)
    full = {"autoscaling": {"minReplicas": 6, "maxReplicas": 6}}
    ours = run(load, Outrider(DRAFTED, full))
    theirs = run(load, Hpa(spec(DRAFTED, full).autoscaling))
    assert ours.seconds_in("Suspended") > 400
    assert ours.goodput > 1.5 * theirs.goodput


def _result(*moments):
    return Result(LOADS[0], [], [Moment(*each) for each in moments])


def test_what_must_not_happen_is_seen_when_it_does():
    swinging = _result((0, 1, 1, 5, "Active"), (5, 1, 1, 5, "Suspended"), (10, 1, 1, 5, "Active"))
    assert swinging.oscillations(WINDOW) == [10]
    assert swinging.oscillations(5.0) == []
    running_away = _result((0, 1, 1, 15, "Active"), (5, 2, 1, 15, "Active"), (10, 4, 1, 15, "Active"))
    assert running_away.runaways(TARGET) == [10]
    too_few = _result((900, 2, 2, 20, "Active"), (905, 1, 1, 20, "Active"), (960, 1, 1, 20, "Suspended"))
    assert too_few.resaturations() == [905]


def test_the_written_results_hold_their_limits():
    written = json.loads(RESULTS.read_text())
    rows = {(row["load"], row["policy"]): row for row in written["rows"]}
    assert set(rows) == {(make().name, who) for make in loads.ALL for who in ("outrider", "hpa", "oracle")}
    for (_, who), row in rows.items():
        if who == "outrider":
            assert row["goodput_of_oracle"] >= written["limits"]["goodput_of_oracle"] == 0.9
            assert row["oscillations"] == row["runaways"] == row["resaturations"] == 0
