"""Plans over time: what a model goes through, in a cluster where plans take effect."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.build import DEFAULTS, DRAFTED, Cluster, answer, child, model, observed

from outrider_operator.api.v1alpha1 import SpeculativeModelStatus
from outrider_operator.fleet.samples import Counters, Sample
from outrider_operator.plan import Defaults, Plan, plan
from outrider_operator.render.policy import remembered
from outrider_operator.status import differs, status

SCALED = {"autoscaling": {"minReplicas": 1, "maxReplicas": 8, "targetConcurrency": 10}}
SATURATED = {"speculativeDecoding": {"saturation": {"disableAtConcurrency": 16, "enableAtConcurrency": 12}}}


def _cluster(*parts, **fields):
    cluster = Cluster(model(*parts), **fields)
    cluster.reconcile()
    return cluster


def _serving(*parts, load=0.0, **fields):
    cluster = _cluster(*parts, **fields)
    cluster.run(60, load)
    assert cluster.condition("Ready")["status"] == "True"
    cluster.plans.clear()
    return cluster


def _changes(cluster):
    return [planned.scaling for _, planned in cluster.plans if planned.scaling]


# -- replicas ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "live", "replicas"),
    [
        ({"replicas": 3}, None, 3),
        ({**SCALED, "replicas": 3}, None, 1),
        ({"replicas": 3}, 5, 3),
        ({"replicas": 3}, 0, 3),
        ({"replicas": 0}, 3, 0),
        (SCALED, 5, 5),
        (SCALED, 9, 8),
        (SCALED, 0, 1),
        ({"autoscaling": {"minReplicas": 3, "maxReplicas": 4, "targetConcurrency": 1}}, 2, 3),
        ({**SCALED, "suspend": True}, 5, 0),
        ({"replicas": 3, "suspend": True}, None, 0),
    ],
    ids=(
        "created by replicas",
        "created by minReplicas",
        "back from autoscaling to the spec",
        "resumed by replicas",
        "none asked for",
        "autoscaling takes the live number over",
        "clamped to maxReplicas",
        "resumed by minReplicas",
        "clamped to minReplicas",
        "suspended",
        "created suspended",
    ),
)
def test_replicas_are_live_unless_a_decision_changes_them(parts, live, replicas):
    seen = observed(parts)
    if live is not None:
        children = {c["kind"]: child(c) for c in plan(seen, DEFAULTS).children}
        body = {**children["Deployment"].body, "spec": {**children["Deployment"].body["spec"], "replicas": live}}
        seen = replace(seen, children=children | {"Deployment": replace(children["Deployment"], body=body)})
    [deployment] = [c for c in plan(seen, DEFAULTS).children if c["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == replicas


def test_suspending_and_resuming_keeps_all_but_the_pods():
    cluster = _serving(SCALED, load=25)
    assert cluster.replicas > 1
    before = set(cluster.children)
    cluster.edit({"suspend": True})
    cluster.run(30)
    assert cluster.replicas == 0
    assert set(cluster.children) == before
    assert cluster.condition("Ready")["reason"] == "Suspended"
    cluster.edit({"suspend": False})
    cluster.run(60)
    assert cluster.replicas == 1
    assert cluster.condition("Ready")["reason"] == "Ready"
    assert "Reconciling" not in {c["type"] for c in cluster.model.status["conditions"]}


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (observed(model=model(spec=None, refusal="spec.x: no")), "InvalidSpec"),
        (observed({"engine": {"tensorParallelSize": 2}}), "UnsupportedParallelism"),
        (observed({"podTemplate": {"spec": {"containers": {}}}}), "PodTemplateRefused"),
        (observed(conflicts=("Service llama (owned by Deployment web)",)), "NameConflict"),
    ],
    ids=("invalid", "parallelism", "pod template", "conflict"),
)
def test_a_refused_model_has_nothing_applied_and_one_event(seen, reason):
    planned = plan(seen, DEFAULTS)
    assert planned.refusal.reason == reason
    assert (planned.children, planned.prune, planned.policy, planned.scaling) == ((), (), None, None)
    [event] = planned.events
    assert event.reason == "Refused"
    assert reason in event.message


def test_a_model_on_its_way_out_is_left_to_garbage_collection():
    assert plan(observed(model=model(deleting=True)), DEFAULTS) == Plan()


def test_what_the_operator_no_longer_wants_is_pruned_and_a_claim_never_is():
    guarded = replace(DEFAULTS, network_policy=True)
    seen = observed({"cache": {"size": "1Gi"}})
    children = {c["kind"]: child(c) for c in plan(seen, guarded).children}
    without = observed(children=children)
    assert plan(without, DEFAULTS).prune == (("NetworkPolicy", "llama"),)
    assert plan(without, guarded).prune == ()
    assert plan(observed(), DEFAULTS).prune == ()


# -- speculation ---------------------------------------------------------------------------------------------------


def test_speculation_is_suspended_under_load_and_resumes_after_with_an_event_each():
    cluster = _serving(SATURATED, load=4)
    assert cluster.state == "Active"
    cluster.run(25, load=20)
    assert cluster.state == "Active"
    cluster.run(5, load=20)
    assert cluster.state == "Suspended"
    assert cluster.condition("SpeculationActive")["reason"] == "Saturated"
    assert cluster.condition("Ready")["status"] == "True"
    cluster.run(300, load=14)
    assert cluster.state == "Suspended"
    cluster.run(30, load=3)
    assert cluster.state == "Active"
    assert cluster.events() == ["SpeculationSuspended", "SpeculationResumed"]


def test_the_demo_turns_within_its_five_seconds():
    parts = {"speculativeDecoding": {"saturation": {"disableAtConcurrency": 4, "stabilizationWindowSeconds": 5}}}
    cluster = _serving(parts, load=1)
    cluster.run(5, load=6)
    assert cluster.state == "Suspended"
    cluster.run(5, load=0)
    assert cluster.state == "Active"


def test_the_policy_pods_are_told_is_the_one_in_the_config_map():
    cluster = _serving(SATURATED, load=20)
    told = cluster.reconcile().policy
    written = json.loads(cluster.children["ConfigMap"].body["data"]["policy"])
    assert written == told.to_json()
    assert written["state"] == "Suspended"


def test_a_restarted_operator_decides_nothing_until_it_has_seen_a_window():
    cluster = _serving(SATURATED, SCALED, load=8)
    cluster.run(300, load=20)
    replicas, state = cluster.replicas, cluster.state
    cluster.plans.clear()
    cluster.restart_operator()
    cluster.run(25, load=0)
    assert (cluster.replicas, cluster.state) == (replicas, state)
    assert cluster.events() == []


def test_switching_the_mode_turns_speculation_and_rolls_nothing():
    cluster = _serving(SATURATED, load=4)
    names = set(cluster.pods)
    for mode, state in (("Disabled", "Disabled"), ("Enabled", "Active"), ("Auto", "Active")):
        cluster.edit({"speculativeDecoding": {"mode": mode}})
        cluster.reconcile()
        assert cluster.state == state
    cluster.run(30, load=1)
    assert set(cluster.pods) == names


# -- scaling -------------------------------------------------------------------------------------------------------


def test_load_brings_replicas_and_their_absence_takes_them_away():
    cluster = _serving(SCALED)
    cluster.run(300, load=35)
    assert cluster.replicas == 4
    cluster.run(280, load=0)
    assert cluster.replicas == 4
    cluster.run(60, load=0)
    assert cluster.replicas == 1
    assert {str(reason) for reason in cluster.events()} == {"ScaledUp", "ScaledDown"}
    decisions = cluster.model.status["autoscaling"]["recentDecisions"]
    assert [(d["from"], d["to"]) for d in decisions] == [(s.before, s.after) for s in _changes(cluster)]
    assert all(d["reason"] for d in decisions)


def test_steps_that_no_status_could_be_written_of_count_towards_the_limit_of_one_minute():
    cluster = _serving(SCALED, load=5)
    before = cluster.model
    cluster.run(30, load=80)
    assert cluster.replicas == 5
    steps = tuple(cluster.model.status["autoscaling"]["recentDecisions"])
    seen = replace(cluster.observed(), model=before, untold=steps)
    assert plan(seen, DEFAULTS).scaling is None
    assert plan(replace(seen, untold=()), DEFAULTS).scaling.after == 8


def test_nothing_runs_away_while_models_load():
    cluster = _serving({"autoscaling": {"maxReplicas": 50, "targetConcurrency": 10}})
    cluster.starts_in = 600.0
    cluster.run(500, load=35)
    assert cluster.replicas == 4


def test_a_pod_that_cannot_be_scheduled_scales_nothing_further_and_takes_no_readiness():
    cluster = _serving(SCALED, room=1)
    cluster.run(1200, load=25)
    assert cluster.replicas == 3
    assert cluster.condition("Ready")["status"] == "True"
    assert "Insufficient nvidia.com/gpu" in cluster.condition("ScalingActive")["message"]


def test_speculation_is_suspended_before_replicas_are_added():
    cluster = _serving(SATURATED, SCALED)
    cluster.run(60, load=40)
    moments = {str(e.reason): at for at, planned in reversed(cluster.plans) for e in planned.events}
    assert moments["SpeculationSuspended"] < moments["ScaledUp"] <= moments["SpeculationSuspended"] + 10


def test_speculation_does_not_resume_while_replicas_that_are_needed_start():
    low = {"speculativeDecoding": {"saturation": {"disableAtConcurrency": 8, "enableAtConcurrency": 7}}}
    target = {"autoscaling": {"maxReplicas": 4, "targetConcurrency": 3}}
    cluster = _serving(low, target)
    cluster.starts_in = 400.0
    cluster.run(45, load=12)
    assert cluster.state == "Suspended"
    assert cluster.replicas == 4
    cluster.run(120, load=6.5)
    assert cluster.state == "Suspended"
    cluster.run(60, load=2)
    assert cluster.state == "Active"


def test_numbers_that_no_pod_can_mean_stop_no_plan():
    """Each is finite and not negative, as is asked of an answer; their quotients are not."""
    cluster = Cluster(model(DRAFTED))
    cluster.reconcile()
    cluster.run(60)
    [name] = cluster.pods
    for number, uptime in enumerate((0.0, 5e-324, 1e-323, 1e-300, 1e-3, 1.0, 2.0, 3.0)):
        cluster.now += 5
        lies = Counters(0.0, 10.0 ** (2 * number), 5e-324, 1e18, 1e18, 1e18, 0.0, uptime)
        cluster.measured({name: Sample(cluster.now, answer(lies, running=1e18, break_even_concurrency=10**18))})
    assert 1 <= cluster.replicas <= 8
    cluster.run(300)
    assert (cluster.state, cluster.condition("Accepted")["status"]) == ("Active", "True")


def test_a_pod_that_falls_silent_changes_nothing():
    cluster = _serving({"autoscaling": {"minReplicas": 3, "maxReplicas": 8, "targetConcurrency": 10}}, load=24)
    names = sorted(cluster.pods)
    cluster.plans.clear()
    cluster.run(600, load=24, silent=names[:2])
    assert _changes(cluster) == []
    assert cluster.condition("ScalingActive")["reason"] == "MetricsUnavailable"
    cluster.run(30, load=24)
    assert cluster.condition("ScalingActive")["reason"] == "WithinTarget"


# -- rollouts ------------------------------------------------------------------------------------------------------


def test_a_new_model_rolls_out_with_a_beginning_and_an_end():
    cluster = _serving()
    cluster.edit({"model": {"revision": "v2"}})
    cluster.run(10)
    assert cluster.condition("Reconciling")["reason"] == "RollingOut"
    assert cluster.condition("Ready")["status"] == "False"
    cluster.run(30)
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Reconciling") == {}
    assert cluster.events() == ["RolloutStarted", "ModelLoaded", "RolloutComplete"]


def test_scaling_steps_and_turns_of_speculation_never_flap_readiness():
    cluster = _serving(SATURATED, SCALED)
    for load in (50, 2, 80, 0):
        cluster.run(200, load=load)
        assert cluster.condition("Ready")["status"] == "True"
    assert "SpeculationSuspended" in cluster.events()
    assert "ScaledUp" in cluster.events()
    assert not {"RolloutStarted", "ModelLoaded", "PodFailed"} & set(cluster.events())


# -- fixpoints -----------------------------------------------------------------------------------------------------

_LOADS = st.lists(st.tuples(st.integers(1, 15), st.sampled_from([0, 3, 12, 18, 40, 90, 300])), min_size=1, max_size=4)
_SPECS = st.sampled_from([(), (SATURATED,), (SCALED,), (SATURATED, SCALED), (DRAFTED,), ({"replicas": 2},)])


@settings(deadline=None, max_examples=15)
@given(_SPECS, _LOADS)
def test_planning_on_what_a_plan_brought_about_changes_nothing(parts, loads):
    cluster = _cluster(*parts)
    for periods, load in loads:
        cluster.run(5 * periods, load)
    first = cluster.reconcile()
    second = plan(cluster.observed(), DEFAULTS)
    assert {c["kind"]: child(c).hash for c in second.children} == {k: c.hash for k, c in cluster.children.items()}
    assert second.policy == first.policy
    assert second.memory == first.memory
    assert second.scaling is None
    cluster.reconcile()
    again = plan(cluster.observed(), DEFAULTS)
    assert not differs(status(cluster.observed(), again), cluster.model.status)
    assert again.events == ()


@settings(deadline=None, max_examples=15)
@given(_LOADS, st.integers(0, 100), st.integers(1, 6))
def test_over_any_load_replicas_stay_in_bounds_and_speculation_turns_at_most_once_a_window(loads, starts_in, room):
    cluster = _cluster(SATURATED, SCALED, starts_in=float(starts_in), room=room)
    turns, state, replicas = [], cluster.state, []
    for periods, load in loads:
        for _ in range(periods):
            cluster.run(5, load)
            replicas.append((cluster.now, cluster.replicas))
            SpeculativeModelStatus.model_validate(cluster.model.status)
            if cluster.state != state:
                turns.append(cluster.now)
                state = cluster.state
    assert all(1 <= number <= 8 for _, number in replicas)
    assert all(later - earlier >= 30 for earlier, later in pairwise(turns))
    for at, number in replicas:
        ago = [before for then, before in replicas if at - 60 < then <= at]
        assert number <= max(2 * min(ago), min(ago) + 4)
    assert len(cluster.events()) == len({(at, e) for at, p in cluster.plans for e in p.events})


@settings(deadline=None, max_examples=15)
@given(_LOADS, st.integers(0, 20))
def test_an_operator_that_restarts_at_any_moment_remembers_the_same_policy(loads, moment):
    cluster, step = _cluster(SATURATED), 0
    for periods, load in loads:
        for _ in range(periods):
            step += 1
            before = remembered(cluster.children["ConfigMap"].body)
            if step == moment:
                cluster.restart_operator()
            cluster.run(5, load)
            if step == moment:
                assert remembered(cluster.children["ConfigMap"].body) == before


def test_settings_decide_the_default_image():
    [deployment] = [c for c in plan(observed(), Defaults("mine:7")).children if c["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:7"
