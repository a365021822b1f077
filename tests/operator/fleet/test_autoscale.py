"""Replicas follow the load: at once upwards, by the highest need downwards, and not on what nobody measured."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.build import START, Did, samples

from outrider_operator.api.v1alpha1 import Autoscaling
from outrider_operator.fleet.autoscale import Past, Situation, decide, load_now, load_peak, scale_out_in_progress
from outrider_operator.fleet.samples import Fleet
from outrider_operator.fleet.windows import View

FULL = 60  # periods: the whole window of five minutes


def _scaling(**fields):
    return Autoscaling.model_validate({"minReplicas": 1, "maxReplicas": 20, "targetConcurrency": 10, **fields})


def _view(*pods, gone=(), unread=0):
    length = max((len(pod) for pod in (*pods, *gone)), default=0)
    histories = {f"pod-{n}": samples(pod, start=5.0 * (length - len(pod))) for n, pod in enumerate(pods)}
    left = {f"gone-{n}": samples(pod) for n, pod in enumerate(gone)}
    names = [*histories, *(f"unread-{n}" for n in range(unread))]
    return View.of(Fleet(histories, left), names, 5.0 * length)


def _decide(view, current, past=(), **fields):
    scaling = _scaling(**{k: fields.pop(k) for k in list(fields) if k in _SCALING})
    return decide(Situation(scaling, current, view, past, START, **fields))


_SCALING = ("minReplicas", "maxReplicas", "targetConcurrency", "scaleUpMaxStep", "scaleDownWindowSeconds")


def _ago(seconds, before, after):
    return Past(START - timedelta(seconds=seconds), before, after)


@pytest.mark.parametrize(
    ("pods", "current", "replicas"),
    [
        ([[10] * 6], 1, 1),
        ([[11] * 6], 1, 1),
        ([[11.1] * 6], 1, 2),
        ([[30] * 6], 1, 3),
        ([[Did(running=8, waiting=22)] * 6], 1, 3),
        ([[0] * 3 + [60] * 3], 1, 3),
        ([[30] * 5], 1, 1),
        ([[30] * 6, [30] * 6], 2, 6),
        ([[30] * 6], 3, 3),
        ([[40] * 6], 3, 4),
        ([[200] * 6], 1, 5),
        ([[200] * 6] * 6, 6, 12),
        ([[200] * 6] * 15, 15, 20),
    ],
    ids=(
        "at the target",
        "within the tolerance",
        "beyond it",
        "three times the target",
        "queued requests count",
        "the mean of the window counts",
        "the window is not full",
        "two replicas",
        "replicas that are starting are capacity",
        "unless the load exceeds them too",
        "at most the step",
        "at most double",
        "at most maxReplicas",
    ),
)
def test_the_way_up(pods, current, replicas):
    decision = _decide(_view(*pods), current)
    assert decision.replicas == replicas
    assert bool(decision.reason) == (replicas != current)


@pytest.mark.parametrize(
    ("past", "replicas"),
    [
        ([_ago(30, 1, 3)], 5),
        ([_ago(50, 1, 2), _ago(30, 2, 3)], 5),
        ([_ago(61, 1, 3)], 7),
        ([_ago(10, 6, 3)], 7),
        ([_ago(n, 3, 3) for n in (50, 40, 30, 20, 10)], 3),
        ([_ago(-30, 1, 3)], 5),
    ],
    ids=(
        "counted from a minute ago",
        "over several steps",
        "a minute later",
        "a step down gives no more",
        "no longer remembered",
        "a clock that jumped back",
    ),
)
def test_the_step_limit_is_per_minute(past, replicas):
    assert _decide(_view(*[[200] * 6] * 3), 3, past).replicas == replicas


@pytest.mark.parametrize(
    ("pods", "current", "replicas"),
    [
        ([[0] * FULL] * 4, 4, 1),
        ([[5] * FULL] * 4, 4, 2),
        ([[5] * (FULL - 1)] * 4, 4, 4),
        ([[5] * 30 + [9] + [5] * 29] * 4, 4, 4),
        ([[5] * 30 + [6] + [5] * 29] * 4, 4, 3),
        ([[9.1] * FULL] * 4, 4, 4),
        ([[9] * FULL] * 12, 12, 11),
        ([[9.1] * FULL] * 12, 12, 12),
        ([[5] * FULL, [5] * FULL, [None] * FULL], 3, 2),
        ([[5] * FULL, [5] * FULL, [None] * FULL], 4, 2),
    ],
    ids=(
        "idle",
        "half",
        "the window is not full",
        "a peak within the window",
        "a lower peak",
        "just too much",
        "at the tolerance",
        "within the tolerance",
        "an unmeasured pod counts as its target",
        "and a starting one for nothing",
    ),
)
def test_the_way_down(pods, current, replicas):
    assert _decide(_view(*pods), current).replicas == replicas


@pytest.mark.parametrize("window", [0, 5, 10])
def test_a_short_window_takes_away_nothing_that_the_way_up_would_bring_back_at_once(window):
    view = _view([25] * 4 + [0] * 2)
    down = _decide(view, 3, scaleDownWindowSeconds=window)
    assert down.replicas == 2
    assert "16.7 requests in flight" in down.reason
    assert _decide(view, 2, scaleDownWindowSeconds=window).replicas == 2
    calm = _decide(_view([9] * 4 + [1] * 2), 2, scaleDownWindowSeconds=window)
    assert calm.reason.startswith("at most 1.0 requests in flight within"), "the window's own words where they suffice"
    assert _decide(_view([0] * 2), 2, scaleDownWindowSeconds=window).replicas == 2, "so much has to be seen first"


def test_a_pod_that_was_never_read_counts_as_its_target_on_the_way_down():
    assert load_peak(_view([5] * 6, unread=2), 30, 10.0) == 25


def test_the_load_of_pods_that_left_still_counts():
    view = _view([5] * FULL, [5] * FULL, gone=([20] * 10,))
    assert _decide(view, 4).replicas == 3
    assert load_now(view) == 10


def test_a_hole_in_the_window_holds_the_way_down():
    late = samples([1] * 5, start=275.0)
    view = View.of(Fleet({"a": late}, {"b": samples([1] * 5)}), ["a"], 300.0)
    assert load_peak(view, 300, 10.0) is None
    assert decide(Situation(_scaling(), 2, view, (), START)).replicas == 2


@pytest.mark.parametrize(
    ("pods", "current"),
    [([[100] * 6, [None] * 6, [None] * 6], 3), ([[None] * FULL] * 2, 2), ([], 3)],
    ids=("most unmeasured", "all unmeasured", "none ready"),
)
def test_too_little_measured_holds_every_decision(pods, current):
    assert _decide(_view(*pods), current).replicas == current


@pytest.mark.parametrize(("current", "replicas", "word"), [(1, 2, "minReplicas"), (9, 8, "maxReplicas")])
def test_bounds_hold_even_unmeasured(current, replicas, word):
    decision = _decide(_view(), current, minReplicas=2, maxReplicas=8)
    assert decision.replicas == replicas
    assert word in decision.reason


REJECTING = [Did(running=5)] * 5 + [Did(running=5, rejected=3)]


@pytest.mark.parametrize(
    ("pods", "current", "past", "replicas"),
    [
        ([REJECTING], 1, (), 2),
        ([REJECTING, [5] * 6], 2, [_ago(90, 1, 2)], 3),
        ([[Did(running=5, rejected=3)] + [5] * 6], 1, (), 1),
        ([REJECTING], 2, [_ago(60, 1, 2)], 2),
        ([REJECTING, [5] * 2], 2, [_ago(90, 1, 2)], 2),
        ([REJECTING, [5] * 6], 2, [_ago(20, 1, 2)], 2),
        ([REJECTING], 2, [_ago(601, 1, 2)], 3),
        ([REJECTING], 3, [_ago(-7200, 1, 2), _ago(60, 2, 3)], 3),
        ([REJECTING], 20, (), 20),
    ],
    ids=(
        "one step",
        "the next once settled",
        "rejected before the window",
        "a replica is starting",
        "a replica has just come",
        "decided within the window",
        "a pod that never comes blocks nothing for ever",
        "a replica is starting, and a step before it is from before the clock jumped back",
        "at most maxReplicas",
    ),
)
def test_rejected_requests_force_one_step_up(pods, current, past, replicas):
    assert _decide(_view(*pods), current, past).replicas == replicas


def test_scaling_out_waits_while_speculation_is_about_to_be_suspended():
    assert _decide(_view([30] * 6), 1, hold_scale_out=True).replicas == 1
    assert _decide(_view(REJECTING), 1, hold_scale_out=True).replicas == 2


@pytest.mark.parametrize(
    ("load", "current", "disable_at", "replicas"),
    [(20, 4, 8, 3), (20, 4, 16, 2), (20, 4, None, 2), (28.8, 4, 8, 4), (28, 5, 8, 4), (20, 4, 1, 4)],
)
def test_fewer_replicas_must_not_bring_saturation(load, current, disable_at, replicas):
    view = _view(*[[load / current] * FULL] * current)
    assert _decide(view, current, disable_at=disable_at).replicas == replicas


@pytest.mark.parametrize(
    ("load", "ready", "desired", "past", "running"),
    [
        (30, 1, 3, [_ago(60, 1, 3)], True),
        (9, 1, 3, [_ago(60, 1, 3)], False),
        (30, 3, 3, [_ago(60, 1, 3)], False),
        (30, 1, 3, [_ago(601, 1, 3)], False),
        (30, 1, 3, [_ago(700, 1, 2), _ago(60, 2, 3)], True),
        (30, 1, 3, [_ago(60, 5, 3)], False),
        (30, 1, 3, [], False),
        (30, 1, 3, [_ago(-3600, 1, 3)], False),
        (30, 1, 4, [_ago(-3600, 1, 3), _ago(60, 3, 4)], True),
    ],
    ids=(
        "running",
        "no longer needed",
        "arrived",
        "too long",
        "by its last step",
        "a step down",
        "never decided",
        "decided an hour from now, before the clock jumped back",
        "decided again since it did",
    ),
)
def test_a_scale_out_is_in_progress_while_needed_and_not_too_long(load, ready, desired, past, running):
    view = _view(*[[load / ready] * 6] * ready)
    assert scale_out_in_progress(view, 10, desired, past, START) is running


_LOADS = st.lists(st.none() | st.floats(0, 300), min_size=1, max_size=70)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(_LOADS, max_size=5),
    st.integers(0, 30),
    st.integers(1, 5),
    st.integers(0, 10),
    st.none() | st.integers(1, 50),
    st.booleans(),
    st.sampled_from([0, 10, 60, 300]),
)
def test_replicas_stay_inside_their_bounds_and_a_decision_stands(pods, current, least, more, disable_at, hold, down):
    scaling = _scaling(minReplicas=least, maxReplicas=least + more, scaleDownWindowSeconds=down)
    view = _view(*pods)
    decision = decide(Situation(scaling, current, view, (), START, disable_at, hold))
    assert least <= decision.replicas <= least + more
    within = min(max(current, least), least + more)
    assert bool(decision.reason) or decision.replicas == current == within
    past = [Past(START, within, decision.replicas)] if decision.reason else []
    again = decide(Situation(scaling, decision.replicas, view, past, START, disable_at, hold))
    assert again.replicas == decision.replicas


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(0, 300), min_size=6, max_size=6), st.integers(1, 10))
def test_more_load_never_means_fewer_replicas(loads, current):
    less, more = (_decide(_view([factor * load for load in loads]), current).replicas for factor in (1, 2))
    assert less <= more
