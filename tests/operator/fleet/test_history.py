"""What is remembered of the pods: as much as the longest window needs, and no more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.build import Did, answer, samples, spec

from outrider_operator.fleet.history import is_still, remember, window
from outrider_operator.fleet.samples import Fleet, Sample
from outrider_operator.fleet.windows import intervals


def _read(at):
    return Sample(at, answer())


def _after(rounds, keep=60.0):
    fleet = Fleet()
    for at, names in rounds:
        fleet = remember(fleet, {name: _read(at) for name in names}, at, keep)
    return fleet


def test_the_longest_window_decides_how_much_is_kept():
    scaling = {"maxReplicas": 2, "targetConcurrency": 4}
    assert window(spec()) == 60
    assert window(spec({"speculativeDecoding": {"saturation": {"stabilizationWindowSeconds": 600}}})) == 600
    assert window(spec({"autoscaling": scaling})) == 300
    assert window(spec({"autoscaling": {**scaling, "scaleDownWindowSeconds": 0}})) == 60


def test_old_samples_go_but_for_the_one_whose_interval_reaches_into_the_window():
    kept = _after([(5.0 * n, "a") for n in range(100)]).samples["a"]
    assert kept[-1].at == 495
    assert kept[0].at <= 495 - 60 < kept[1].at


def test_a_pod_that_left_is_told_apart_and_forgotten_after_the_window():
    fleet = _after([(0, "ab"), (5, "ab"), (10, "a")])
    assert set(fleet.samples) == {"a"}
    assert set(fleet.gone) == {"b"}
    assert set(_after([(0, "ab"), (5, "ab"), (10, "a"), (66, "a")]).gone) == set()


def test_a_pod_that_comes_back_takes_up_its_history():
    fleet = _after([(0, "a"), (5, ""), (10, "a")])
    assert [sample.at for sample in fleet.samples["a"]] == [0, 10]
    assert not fleet.gone


def test_hours_of_samples_are_thinned_without_losing_a_request():
    fleet, history = Fleet(), samples([2.0] * 2400)
    for each in history:
        fleet = remember(fleet, {"a": each}, each.at, 10800.0)
    kept = fleet.samples["a"]
    assert len(kept) < 1000
    assert kept[-1].at == 12000
    assert kept[0].at <= 12000 - 10800 < kept[1].at + 60
    assert {interval.running for interval in intervals(kept)} == {2.0}
    assert len(intervals(kept)) == len(kept) - 1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(1, 30), st.sets(st.sampled_from("abc"))), max_size=60), st.floats(5, 300))
def test_history_is_ordered_bounded_and_each_pod_in_one_place(steps, keep):
    fleet, now = Fleet(), 0.0
    for wait, names in steps:
        now += wait
        fleet = remember(fleet, {name: _read(now) for name in names}, now, keep)
        assert set(fleet.samples) == names
        assert not set(fleet.samples) & set(fleet.gone)
        for history in (*fleet.samples.values(), *fleet.gone.values()):
            times = [sample.at for sample in history]
            assert times == sorted(times)
            assert all(at > now - keep for at in times[1:])


@pytest.mark.parametrize(
    ("pods", "still"),
    [
        ([[0, 0]], True),
        ([[1, 0, 0]], True),
        ([[0, 1]], False),
        ([[1, 1]], False),
        ([[None, None]], True),
        ([[0, None]], False),
        ([[None, 0]], False),
        ([[0, 0], [0, 1]], False),
        ([[0, Did(fields={"revision": "new"})]], False),
        ([[0, Did(rejected=1)]], False),
        ([], True),
    ],
    ids=str,
)
def test_a_fleet_is_still_when_its_last_round_found_all_as_the_one_before(pods, still):
    assert is_still(Fleet({f"pod-{n}": samples(pod) for n, pod in enumerate(pods)})) is still


def test_a_pod_just_met_or_just_restarted_is_news():
    assert not is_still(Fleet({"a": samples([])}))
    assert not is_still(Fleet({"a": (*samples([0, 0]), *samples([], start=15.0))}))
