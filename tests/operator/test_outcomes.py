"""Where things end: whatever happened before, a load that stays finds the fleet in a good state, and it stays there."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.operator.build import DRAFTED, Cluster, model

from outrider_operator.fleet.saturation import enable_at
from outrider_operator.render.policy import remembered

MINUTE = 60.0


def _saturation(disable_at, enable_at=None, window=30, **fields):
    """With None for `disable_at` it is left to what pods measure."""
    given_levels = {"disableAtConcurrency": disable_at, "enableAtConcurrency": enable_at}
    given_levels = {name: level for name, level in given_levels.items() if level}
    return {"speculativeDecoding": {"saturation": {**given_levels, "stabilizationWindowSeconds": window}, **fields}}


def _scaling(target, least=1, most=8, down=60):
    return {
        "autoscaling": {
            "minReplicas": least,
            "maxReplicas": most,
            "targetConcurrency": target,
            "scaleDownWindowSeconds": down,
        }
    }


def _cluster(*parts, **fields):
    cluster = Cluster(model(*parts), **fields)
    cluster.reconcile()
    cluster.run(MINUTE)
    return cluster


def _memory(cluster):
    return remembered(cluster.children["ConfigMap"].body)


def _why_bad(cluster, load):
    """What a user would complain about, were it to stay like this; empty when nothing is wrong."""
    spec = cluster.model.spec
    saturation, scaling = spec.speculative_decoding.saturation, spec.autoscaling
    ready = sum(each.ready for each, _ in cluster.pods.values())
    running, memory = load / ready, _memory(cluster)
    threshold = memory.disable_at or saturation.disable_at_concurrency or cluster.break_even
    if memory.disable_at and running <= enable_at(threshold, saturation):
        return f"suspended at {running} running, though it resumes at {enable_at(threshold, saturation)}"
    measured = cluster.break_even if saturation.disable_at_concurrency is None else None
    if memory.disable_at and measured and running <= enable_at(measured, saturation):
        return f"suspended at {running} running, though drafting pays up to {measured}"
    if cluster.state == "Active" and threshold and running >= threshold:
        return f"active at {running} running, though it saturates at {threshold}"
    floor = spec.speculative_decoding.min_acceptance_percent
    if memory.retry_at and load and not memory.disable_at and 100 * cluster.acceptance >= floor:
        return f"paused though {100 * cluster.acceptance} % are accepted"
    if scaling is None:
        return ""
    target, replicas = scaling.target_concurrency, cluster.replicas
    if load > 1.1 * target * replicas and replicas < scaling.max_replicas:
        return f"{replicas} replicas for {load} at {target} each"
    roomy = (
        load / (replicas - 1) < min(target, 0.9 * threshold if threshold else target) * 0.9 if replicas > 1 else False
    )
    if roomy and replicas > scaling.min_replicas:
        return f"{replicas} replicas where one fewer is enough for {load} at {target} each"
    return ""


def _changes(cluster):
    return [(at, str(event.reason)) for at, planned in cluster.plans for event in planned.events]


# past: (load, seconds) one after the other; then `load` for good
CASES = {
    "the deadlock: too few to resume, too many to shrink while active": (
        [_saturation(16, 8), _scaling(24, least=2)],
        [(40, 120)],
        20,
    ),
    "the same from the other side": ([_saturation(16, 8), _scaling(24)], [(44, 400), (20, 200)], 20),
    "the target is at the threshold": ([_saturation(10), _scaling(10)], [], 35),
    "the target is far above the threshold": ([_saturation(4, 2), _scaling(24)], [], 60),
    "load between the thresholds": ([_saturation(16, 8), _scaling(12)], [(100, 120)], 24),
    "as few as resume needs": ([_saturation(16, 1), _scaling(10)], [(60, 120)], 3),
    "the threshold of one request": ([_saturation(1), _scaling(10)], [(5, 60)], 0),
    "beyond maxReplicas": ([_saturation(16, 12), _scaling(10, most=3)], [], 90),
    "no autoscaling": ([_saturation(16, 12), {"replicas": 2}], [(60, 120)], 20),
    "a window of nothing": ([_saturation(16, 12, window=0), _scaling(10)], [(60, 60)], 22),
    "a long window": ([_saturation(16, 12, window=180), _scaling(10)], [(60, 120)], 22),
    "acceptance that came back": ([{"speculativeDecoding": {"minAcceptancePercent": 50}}], [(20, 60)], 20),
    "the example of the README": ([DRAFTED], [(70, 300), (3, 30), (90, 60)], 33),
}


@pytest.mark.parametrize("case", CASES)
def test_a_load_that_stays_ends_in_a_good_state(case):
    parts, past, load = CASES[case]
    cluster = _cluster(*parts)
    for before, seconds in past:
        cluster.run(seconds, before)
    cluster.run(6 * MINUTE, load)
    cluster.plans.clear()
    cluster.run(MINUTE, load)
    assert _why_bad(cluster, load) == ""
    assert _changes(cluster) == []


def test_the_deadlock_ends_plainly_within_the_target_or_active_below_the_threshold():
    """Suspended at 20 on two replicas: 10 each is too many to resume, and fewer than the target."""
    cluster = _cluster(_saturation(16, 8), _scaling(24, least=1), _scaling(24, least=2))
    cluster.run(120, 40)
    assert (cluster.state, cluster.replicas) == ("Suspended", 2)
    cluster.edit({"autoscaling": {"minReplicas": 1}})
    cluster.run(10 * MINUTE, 20)
    assert (cluster.state, cluster.replicas) == ("Suspended", 1)  # within its target, decoding plainly
    cluster.run(2 * MINUTE, 7)
    assert cluster.state == "Active"


@pytest.mark.parametrize("load", [30, 60])
def test_a_pod_that_can_never_be_scheduled_blocks_nothing_for_ever(load):
    cluster = _cluster(_saturation(16, 12), _scaling(10), room=1)
    cluster.run(2 * MINUTE, load)
    assert cluster.state == "Suspended"
    assert cluster.replicas == load // 10
    assert "Insufficient" in cluster.condition("ScalingActive")["message"]
    cluster.run(30, 11.5)
    assert cluster.state == "Suspended", "the load still needs the replicas that are on their way"
    cluster.run(10 * MINUTE, 11.5)
    assert cluster.state == "Active", "after ten minutes they are no longer waited for"
    assert cluster.condition("Ready")["status"] == "True"


def test_acceptance_that_does_not_come_back_is_tried_ever_more_seldom_and_taken_back_when_it_does():
    cluster = _cluster({"speculativeDecoding": {"minAcceptancePercent": 50}})
    cluster.acceptance = 0.2
    cluster.run(20 * MINUTE, 10)
    assert _memory(cluster).attempts == 5  # one, two, four, eight minutes, and sixteen that are running
    assert [reason for _, reason in _changes(cluster)].count("SpeculationSuspended") == 1
    cluster.acceptance = 0.8
    cluster.run(14 * MINUTE, 10)
    assert (cluster.state, _memory(cluster).attempts) == ("Active", 0)
    assert _changes(cluster)[-1][1] == "SpeculationResumed"


def test_a_trial_is_of_one_pod_and_the_others_stay_plain():
    cluster = _cluster({"speculativeDecoding": {"minAcceptancePercent": 50}, "replicas": 3})
    cluster.acceptance = 0.2
    cluster.run(MINUTE, 30)
    assert cluster.state == "Suspended"
    cluster.run(MINUTE, 0)
    states = sorted(str(policy.state) for policy in cluster.told.values())
    assert states == ["Active", "Suspended", "Suspended"]
    written = cluster.children["ConfigMap"].body["data"]["policy"]
    assert '"Suspended"' in written, "a pod that starts meanwhile decodes plainly"
    assert cluster.condition("SpeculationActive")["message"].endswith(f"on pod {_memory(cluster).trial}")
    cluster.acceptance = 0.9
    cluster.run(MINUTE, 30)
    assert cluster.state == "Active"


def test_a_break_even_of_bad_times_holds_speculation_off_only_until_it_is_measured_anew():
    cluster = _cluster({"replicas": 3})
    cluster.break_even = 4
    cluster.run(MINUTE, 30)
    assert (cluster.state, _memory(cluster).disable_at) == ("Suspended", 4)
    cluster.break_even = 30
    cluster.plans.clear()
    cluster.run(3 * MINUTE, 30)
    assert cluster.state == "Active"
    assert [reason for _, reason in _changes(cluster)] == ["SpeculationResumed"]
    told = [sorted(str(planned.policy_of(name).state) for name in cluster.pods) for _, planned in cluster.plans]
    assert ["Active", "Suspended", "Suspended"] in told, "one pod measures it"


def test_a_break_even_that_stays_low_is_measured_ever_more_seldom_and_turns_nothing():
    cluster = _cluster({"replicas": 2})
    cluster.break_even = 4
    cluster.run(MINUTE, 20)
    cluster.plans.clear()
    cluster.run(20 * MINUTE, 20)
    assert _memory(cluster).remeasured == 4  # after one, two, four and eight minutes
    assert (cluster.state, _changes(cluster)) == ("Suspended", [])
    on_trial = sum(bool(planned.memory.trial) for _, planned in cluster.plans) * 5
    assert on_trial <= 4 * 45, "seconds, and of one pod"


def test_a_new_draft_ends_the_pause_and_is_judged_by_its_own_pods():
    cluster = _cluster(DRAFTED, {"speculativeDecoding": {"minAcceptancePercent": 50}})
    cluster.acceptance = 0.2
    cluster.run(2 * MINUTE, 8)
    assert cluster.model.status["speculativeDecoding"]["reason"] == "LowAcceptance"
    before = set(cluster.pods)
    cluster.edit({"speculativeDecoding": {"draft": {"revision": "v2"}}})
    cluster.acceptance = 0.9
    cluster.run(5 * MINUTE, 8)
    assert not before & set(cluster.pods), "the draft is loaded anew"
    assert cluster.state == "Active"
    assert _memory(cluster).attempts == 0


# -- an idle fleet -------------------------------------------------------------------------------------------------

IDLE = {
    "smallest": [],
    "replicas": [{"replicas": 4}],
    "drafted and scaled": [DRAFTED],
    "disabled": [{"speculativeDecoding": {"mode": "Disabled"}}],
    "suspended": [{"suspend": True}],
    "with a floor": [{"speculativeDecoding": {"minAcceptancePercent": 40}}],
}


@pytest.mark.parametrize(("case", "load"), [*((case, 0) for case in IDLE), ("drafted and scaled", 7)])
def test_ten_minutes_of_standing_still_write_nothing(case, load):
    """A thousand such objects cause no write either: there is nothing in a look that depends on another object."""
    cluster = _cluster(*IDLE[case])
    cluster.run(2 * MINUTE, load)
    before = copy.deepcopy(cluster.model.status), {kind: each.hash for kind, each in cluster.children.items()}
    cluster.plans.clear()
    for _ in range(120):
        cluster.run(5, load)
        assert (cluster.model.status, {kind: each.hash for kind, each in cluster.children.items()}) == before
    assert _changes(cluster) == []


def test_a_pause_that_waits_for_traffic_writes_nothing_either():
    cluster = _cluster({"speculativeDecoding": {"minAcceptancePercent": 50}})
    cluster.acceptance = 0.2
    cluster.run(2 * MINUTE, 20)
    cluster.run(5 * MINUTE, 0)
    before = copy.deepcopy(cluster.model.status), cluster.children["ConfigMap"].hash
    assert _memory(cluster).trial
    cluster.run(10 * MINUTE, 0)
    assert (cluster.model.status, cluster.children["ConfigMap"].hash) == before


# -- restarts ------------------------------------------------------------------------------------------------------

FLOOR = {"speculativeDecoding": {"minAcceptancePercent": 50}}
MOMENTS = {
    "idle": ([DRAFTED], 0.6, [(0, 60)], 0),
    "active": ([DRAFTED], 0.6, [(8, 120)], 8),
    "suspended": ([DRAFTED], 0.6, [(90, 300)], 90),
    "between the thresholds": ([_saturation(16, 8)], 0.6, [(20, 60), (12, 60)], 12),
    "paused": ([FLOOR], 0.2, [(20, 90)], 20),
    "on trial": ([FLOOR], 0.2, [(20, 90), (0, 120)], 0),
    "replicas starting": ([DRAFTED], 0.6, [(50, 50)], 50),
    "about to shrink": ([_scaling(10, down=300)], 0.6, [(40, 200), (5, 280)], 5),
    "unmeasured": ([DRAFTED], 0.6, [(8, 60)], 8),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_restart_of_the_operator_turns_and_scales_nothing_that_would_not_have_been(moment):
    parts, acceptance, past, load = MOMENTS[moment]
    stays = _cluster(*parts)
    stays.acceptance = acceptance
    for before, seconds in past:
        stays.run(seconds, before)
    silent = list(stays.pods) if moment == "unmeasured" else []
    if silent:
        stays.run(60, load, silent=silent)
    stays.plans.clear()
    restarts = copy.deepcopy(stays)
    restarts.restart_operator()
    before = (restarts.state, restarts.replicas, _memory(restarts))
    restarts.reconcile()
    assert (restarts.state, restarts.replicas, _memory(restarts)) == before
    if moment != "on trial":
        restarts.run(20, load, silent=silent)
        assert (restarts.state, restarts.replicas) == before[:2]
    for cluster in (stays, restarts):
        cluster.run(6 * MINUTE, load, silent=silent)
    told, without = ([reason for _, reason in _changes(each)] for each in (restarts, stays))
    assert told == without
    assert (restarts.state, restarts.replicas) == (stays.state, stays.replicas)


def test_a_restart_at_any_moment_of_a_rush_turns_and_scales_nothing_by_itself():
    cluster = _cluster(DRAFTED)
    for load, seconds in ((8, 60), (70, 180), (5, 240)):
        for _ in range(seconds // 30):
            cluster.run(30, load)
            restarted = copy.deepcopy(cluster)
            restarted.restart_operator()
            restarted.plans.clear()
            restarted.reconcile()
            restarted.run(20, load)
            assert (restarted.state, restarted.replicas, _changes(restarted)) == (cluster.state, cluster.replicas, [])
    assert {"SpeculationSuspended", "SpeculationResumed", "ScaledUp"} <= set(cluster.events())


# -- the search ----------------------------------------------------------------------------------------------------

_SPECS = st.builds(
    lambda disable, share, window, target, most, floor: [
        _saturation(
            disable, max(1, disable * share // 8) if (disable or 0) > 1 else None, window, minAcceptancePercent=floor
        ),
        _scaling(target, most=most),
    ],
    st.none() | st.integers(1, 30),
    st.integers(1, 7),
    st.sampled_from([0, 10, 30, 60]),
    st.integers(1, 30),
    st.integers(1, 8),
    st.sampled_from([0, 50]),
)
_PAST = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 5, 12, 20, 45, 120, 300]), st.sampled_from([5, 30, 90]), st.sampled_from("gbrsplfe")
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=6, phases=[Phase.reuse, Phase.generate])
@given(_SPECS, _PAST, st.sampled_from([0, 3, 8, 20, 40, 100]), st.integers(1, 8), st.sampled_from([0.0, 20.0, 120.0]))
def test_no_past_leaves_the_fleet_stuck(parts, past, load, room, starts_in):
    """Good or bad drafts, restarts and silence, pods lost, clocks late and fast, edits; then good drafts under a steady
    load, for longer than ten minutes."""
    cluster = _cluster(*parts, room=room, starts_in=starts_in)
    cluster.run(2 * MINUTE)
    for before, seconds, what in past:
        cluster.acceptance, cluster.break_even = (0.2, 3) if what == "b" else (0.6, 20)
        if what == "r":
            cluster.restart_operator()
        if what == "p":
            cluster.pods.pop(next(iter(cluster.pods), ""), None)
        if what in "lf":
            cluster.jumped += -7200 if what == "l" else 7200
        if what == "e":
            cluster.edit({"autoscaling": {"minReplicas": 1, "maxReplicas": 1 + before % 8}})
        cluster.run(seconds, before, silent=list(cluster.pods) if what == "s" else [])
    cluster.acceptance, cluster.break_even = 0.6, 20
    cluster.run(12 * MINUTE, load)
    turns = [at for at, reason in _changes(cluster) if reason.startswith("Speculation")]
    window = cluster.model.spec.speculative_decoding.saturation.stabilization_window_seconds
    hurried = any(what == "f" for _, _, what in past)  # a pause is over when the clock says so
    assert hurried or all(later - earlier >= window for earlier, later in pairwise(turns))
    cluster.plans.clear()
    cluster.run(MINUTE, load)
    assert _why_bad(cluster, load) == ""
    assert _changes(cluster) == []
