"""A fleet under load and faults, over real HTTP in simulated time: what is decided, held, and said."""

from __future__ import annotations

from contextlib import asynccontextmanager

import aiohttp
import pytest
from tests.fleet import loads
from tests.fleet.admin import AdminPorts, Fault
from tests.fleet.over_http import OverHttp
from tests.fleet.pod import Pod
from tests.fleet.service import Service
from tests.operator.build import model

from outrider_operator.fleet import measure

MINUTE = 60.0
SATURATING = {
    "speculativeDecoding": {
        "saturation": {"disableAtConcurrency": 16, "enableAtConcurrency": 12},
        "minAcceptancePercent": 30,
    },
    "autoscaling": {"minReplicas": 1, "maxReplicas": 6, "targetConcurrency": 10, "scaleDownWindowSeconds": 60},
}


@asynccontextmanager
async def _fleet(*spec, rate=lambda now: 3.0, seconds=3600.0, starts_in=30.0, peak=12.0, **pods):
    load = loads.Load("test", seconds, peak, rate)
    service = Service(load.requests(), lambda now: Pod(now=now, **pods), starts_in=0.0)
    async with AdminPorts() as ports, aiohttp.ClientSession() as session:
        fleet = OverHttp(model(*spec), service=service, ports=ports, session=session)
        fleet.reconcile()
        service.scale(fleet.replicas)
        service.starts_in = starts_in
        await fleet.live(MINUTE)
        yield fleet


def _story(fleet):
    """What `kubectl get specm -w` and `kubectl events` tell of it, in order."""
    return [str(event.reason) for _, planned in fleet.plans for event in planned.events]


async def test_a_rush_reads_like_a_story_and_ends_where_it_began():
    async with _fleet(SATURATING, rate=lambda now: 7.0 if 120 <= now < 400 else 1.5) as fleet:
        assert (fleet.state, fleet.replicas) == ("Active", 1)
        fleet.plans.clear()
        await fleet.live(5.5 * MINUTE)
        assert fleet.replicas >= 3
        assert all(place.pod.policy.state == fleet.state for place in fleet.service.places.values() if place.ready)
        await fleet.live(6 * MINUTE)
        story = _story(fleet)
        assert (fleet.state, fleet.replicas) == ("Active", 1)
    assert story[:2] == ["SpeculationSuspended", "ScaledUp"], "what is free comes first"
    assert story.count("SpeculationSuspended") == story.count("SpeculationResumed") == 1
    assert story[-1] == "ScaledDown"
    reasons = [each["reason"] for each in fleet.model.status["autoscaling"]["recentDecisions"]]
    assert all("requests in flight" in reason for reason in reasons)


async def test_drafts_that_are_seldom_right_are_put_aside_tried_on_one_pod_and_taken_back():
    async with _fleet(SATURATING, {"autoscaling": {"minReplicas": 2}}, rate=lambda now: 1.5, acceptance=0.2) as fleet:
        await fleet.live(1.5 * MINUTE)
        pods = fleet.service.ready
        assert fleet.condition("SpeculationActive")["reason"] == "LowAcceptance"
        assert {pod.policy.state for pod in pods.values()} == {"Suspended"}
        for pod in pods.values():
            pod.acceptance = 0.8
        while "being tried" not in fleet.condition("SpeculationActive")["message"]:
            await fleet.live(5)
        assert sorted(pod.policy.state for pod in pods.values()) == ["Active", "Suspended"]
        await fleet.live(MINUTE)
        assert {pod.policy.state for pod in pods.values()} == {"Active"}
        assert fleet.condition("SpeculationActive")["reason"] == "Drafting"


@pytest.mark.parametrize("fault", [Fault.SLOW, Fault.NAN, Fault.NEGATIVE, Fault.HTML, Fault.ERROR, Fault.RESET, None])
@pytest.mark.parametrize("well", [0, 1, 2], ids=("no pod answers", "one in four", "half of them"))
async def test_what_pods_say_wrongly_decides_nothing_is_said_and_is_forgotten_when_they_recover(
    fault, well, monkeypatch
):
    monkeypatch.setattr(measure, "TIMEOUT", aiohttp.ClientTimeout(total=0.25))
    spec = {"autoscaling": {"minReplicas": 4, "maxReplicas": 9}}
    async with _fleet(SATURATING, spec, rate=lambda now: 4.0 if now < 61 else 0.0) as fleet:
        assert fleet.replicas == 4
        before, addresses = (fleet.state, fleet.replicas), dict(fleet.addresses)
        fleet.plans.clear()
        if fault is None:
            for name in list(addresses)[well:]:
                await fleet.ports.close(addresses[name])
        else:
            fleet.break_all(fault, but=well)
        await fleet.live(30 if fault is Fault.SLOW else 1.5 * MINUTE)
        assert (fleet.state, fleet.replicas) == before
        assert _story(fleet) == []
        blind = well < 2
        assert (fleet.condition("ScalingActive")["reason"] == "MetricsUnavailable") is blind
        assert fleet.condition("Ready")["status"] == "True"
        if fault is None:
            for name in list(addresses)[well:]:
                fleet.addresses[name] = await fleet.ports.open(fleet.service.places[name].pod)
        else:
            fleet.break_all(Fault.NONE)
        await fleet.live(20)
        assert fleet.condition("ScalingActive")["reason"] == "WithinTarget"
        assert fleet.condition("SpeculationActive")["reason"] != "MetricsUnavailable"


@pytest.mark.parametrize("well", [0, 1], ids=("no pod answers", "one in four"))
async def test_what_is_due_waits_until_pods_can_be_measured_again(well):
    """Load has gone: speculation would resume and replicas would go, were it known."""
    spec = {"autoscaling": {"minReplicas": 1, "maxReplicas": 4}}
    async with _fleet(SATURATING, spec, rate=lambda now: 12.0 if now < 240 else 0.0) as fleet:
        await fleet.live(3 * MINUTE)
        assert (fleet.state, fleet.replicas) == ("Suspended", 4)
        fleet.plans.clear()
        for fault in (Fault.NAN, Fault.NEGATIVE, Fault.HTML, Fault.ERROR, Fault.RESET):
            fleet.break_all(fault, but=well)
            await fleet.live(40)
        assert (fleet.state, fleet.replicas, _story(fleet)) == ("Suspended", 4, [])
        assert fleet.condition("ScalingActive")["reason"] == "MetricsUnavailable"
        fleet.break_all(Fault.NONE)
        await fleet.live(2 * MINUTE)
        assert (fleet.state, fleet.replicas) == ("Active", 1)
        assert sorted(set(_story(fleet))) == ["ScaledDown", "SpeculationResumed"]
        assert fleet.condition("ScalingActive")["reason"] == "WithinTarget"


async def test_saturation_is_decided_said_and_told_within_its_window_and_ten_seconds():
    async with _fleet(SATURATING, rate=lambda now: 12.0 if now > 61 else 0.0) as fleet:
        fleet.plans.clear()
        pod = fleet.service.ready["llama-0001"]
        while pod.running < 16:
            await fleet.live(5)
        await fleet.live(40)
        assert (pod.policy.state, pod.policy.reason, pod.tokens) == ("Suspended", "Saturated", 0)
        assert fleet.condition("SpeculationActive")["reason"] == "Saturated"
        assert "SpeculationSuspended" in _story(fleet)


async def test_changed_words_reach_every_pod_within_ten_seconds_and_replace_none():
    async with _fleet({"replicas": 3}) as fleet:
        pods = set(fleet.pods)
        for change, told in (
            ({"mode": "Disabled"}, {"mode": "Disabled", "state": "Disabled"}),
            ({"mode": "Auto", "numSpeculativeTokens": 2}, {"state": "Active", "num_speculative_tokens": 2}),
            ({"minAcceptancePercent": 5}, {"min_acceptance_percent": 5}),
            ({"saturation": {"disableAtConcurrency": 1, "stabilizationWindowSeconds": 0}}, {"state": "Suspended"}),
            ({"saturation": {"disableAtConcurrency": 60, "enableAtConcurrency": 50}}, {"state": "Active"}),
        ):
            fleet.edit({"speculativeDecoding": change})
            await fleet.live(10)
            for pod in fleet.service.ready.values():
                assert {name: getattr(pod.policy, name) for name in told} == told
        assert set(fleet.pods) == pods
