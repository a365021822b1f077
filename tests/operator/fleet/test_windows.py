"""Windows: exact means whatever the timing, restarts and gaps seen for what they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.build import Did, answer, samples

from outrider_operator.fleet.samples import Counters, Fleet, Sample
from outrider_operator.fleet.windows import Track, View, intervals, rounds
from outrider_operator.settings import Settings


def _counters(running, uptime):
    return Counters(running, 0, 0, 0, 0, 0, 0, uptime)


def _tracks(*pods):
    return [Track.of(samples(pod)) for pod in pods]


def _sample(at, running, uptime):
    return Sample(at, answer(_counters(running, uptime)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 14), st.floats(0, 500)), min_size=1, max_size=30))
def test_means_are_exact_whatever_the_operators_timing(periods):
    at, total, uptime, history = 0.0, 0.0, 1.0, [_sample(0.0, 0.0, 1.0)]
    for seconds, running in periods:
        at, uptime, total = at + seconds, uptime + seconds, total + running * seconds
        history.append(_sample(at, total, uptime))
    found = [interval.running for interval in intervals(history)]
    assert found == pytest.approx([running for _, running in periods], rel=1e-6, abs=1e-6)


def test_a_restarted_pod_counts_what_it_did_since():
    [interval] = intervals([_sample(0, 1000, 500), _sample(5, 6, 3)])
    assert interval.running == 2


def test_a_pod_that_restarted_and_ran_longer_than_before_is_seen_to_have_restarted():
    [interval] = intervals([_sample(0, 10, 2), _sample(5, 4, 4)])
    assert interval.running == 1


@pytest.mark.parametrize(
    "history",
    [
        [_sample(0, 0, 1), Sample(5, None, "timeout"), _sample(10, 50, 11)],
        [_sample(0, 0, 1), _sample(91, 50, 92)],
        [_sample(0, 3, 2), _sample(5, 0, 0)],
        [_sample(0, 0, 0), _sample(5, 1e18, 5e-324)],
        [_sample(5, 0, 1), _sample(5, 1, 2)],
        [_sample(0, 0, 1)],
        [],
    ],
    ids=("failed reading", "too long", "no uptime", "no uptime to speak of", "no time", "one sample", "nothing"),
)
def test_a_gap_is_no_interval(history):
    assert intervals(history) == []


def test_rounds_line_up_pods_and_count_the_unmeasured():
    grid = rounds(_tracks([1, 2, 3], [3, None, 5]), end=15.0, count=3)
    assert [(len(each.measured), each.unmeasured) for each in grid] == [(1, 1), (1, 1), (2, 0)]
    assert grid[2].mean(lambda pod: pod.running) == 2
    assert grid[0].total(lambda pod: pod.running, unmeasured=10) == 13


def test_a_pod_is_in_no_round_before_it_was_there_or_after_it_left():
    late, left = samples([9], start=10.0), samples([4])
    grid = rounds([Track.of(late), Track.of(left), Track.of(())], end=15.0, count=3)
    assert [(len(each.measured), each.unmeasured) for each in grid] == [(1, 0), (0, 0), (1, 0)]
    assert [each.gap for each in grid] == [False, True, False]


def test_fewer_than_half_measured_is_a_gap_and_half_is_not():
    assert not rounds(_tracks([1], [None]), 5.0, 1)[0].gap
    assert rounds(_tracks([1], [None], [None]), 5.0, 1)[0].gap


def test_a_long_interval_measures_no_period_but_the_past():
    thinned = [Track.of([_sample(0, 0, 1), _sample(60, 120, 61)])]
    assert [each.unmeasured for each in rounds(thinned, 60.0, 2)] == [1, 1]
    assert [each.total(lambda pod: pod.running, 0) for each in rounds(thinned, 60.0, 2, 90.0)] == [2, 2]


def test_the_rarest_measuring_that_the_settings_allow_still_measures_every_period():
    rarest = next(limit.le for limit in Settings.model_fields["measure_seconds"].metadata if hasattr(limit, "le"))
    history = [_sample(n * (rarest + 0.5), 2 * n * rarest, 1 + n * rarest) for n in range(8)]
    grid = View.of(Fleet({"a": tuple(history)}), ["a"], history[-1].at).window(60)
    assert [each.unmeasured for each in grid] == [0] * 12


def test_a_view_knows_who_can_be_measured_now():
    fleet = Fleet({"a": samples([1, 1]), "b": samples([1, None]), "c": samples([None] * 5)})
    view = View.of(fleet, ["a", "b", "c", "new"], now=25.0)
    assert set(view.fresh) == {"a"} | ({"b"} if 25.0 - 5.0 <= 15.0 else set())
    assert not view.measurable
    assert View.of(fleet, ["a", "b", "c"], now=12.0).measurable
    assert not View.of(fleet, [], now=12.0).measurable


def test_what_a_pod_said_before_it_was_ready_again_is_past_until_it_is_read_anew():
    view = View.of(Fleet({"a": samples([1, 1])}, gone={"b": samples([7])}), ["a", "b"], now=10.0)
    assert view.ready["b"] == ()
    assert [each.total(lambda pod: pod.running, 0) for each in view.past(10)] == [1, 8]


def test_a_window_needs_samples_as_old_as_itself():
    view = View.of(Fleet({"a": samples([1] * 5)}), ["a"], now=25.0)
    assert view.window(25) is not None
    assert view.window(30) is None
    assert View.of(Fleet(), ["a"], now=25.0).window(5) is None


def test_the_past_has_the_pods_that_left():
    fleet = Fleet({"a": samples([1, 1])}, gone={"b": samples([7])})
    view = View.of(fleet, ["a"], now=10.0)
    totals = [each.total(lambda pod: pod.running, 0) for each in view.past(10)]
    assert totals == [1, 8]


def test_queued_requests_are_in_flight():
    [interval] = intervals(samples([Did(running=2, waiting=3)]))
    assert interval.in_flight == 5
