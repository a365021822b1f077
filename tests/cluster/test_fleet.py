"""Fleets under a real API server: simulated pods that keep the runtime's contract, time running fast, and the ways in
which others set the number of replicas."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from localcluster.controlplane import ControlPlane
from tests.cluster.fast_fleet import FastFleet, fast, living
from tests.cluster.operator_rig import SYSTEM, Rig, eventually, smallest
from tests.fleet.loads import Load
from tests.fleet.pod import Pod
from tests.fleet.service import Service

from outrider_operator.kube import Client, load
from outrider_operator.settings import Settings

pytest_plugins = ["tests.cluster.operator_fixtures"]

INSTALL = Path(__file__).parents[2] / "manifests" / "install"
AS_IT_IS = {"measure_seconds": 5.0}  # of a clock that runs fast
SCALE = "/apis/outrider.dev/v1alpha1/namespaces/{}/speculativemodels/llama/scale"


def _service(rate: Callable[[float], float], peak: float, starts_in: float = 30.0, **pods: Any) -> Service:
    arrivals = Load("cluster", 7200.0, peak, rate).requests()
    return Service(arrivals, lambda now: Pod(now=now, **pods), starts_in=starts_in)


async def test_drafts_that_are_seldom_right_are_put_aside_tried_on_one_pod_and_taken_back(rig: Rig) -> None:
    clock = fast(20)
    await rig.operator(settings=AS_IT_IS, clock=clock)
    speculation = {"minAcceptancePercent": 30, "saturation": {"disableAtConcurrency": 40}}
    await rig.create(smallest(replicas=2, speculativeDecoding=speculation))
    await eventually(rig.is_settled, "children and status")
    async with living(rig, _service(lambda now: 1.5, 1.5, acceptance=0.2), clock) as fleet:
        pods = await eventually(lambda: _ready(fleet, 2), "two pods")
        await eventually(lambda: _says(rig, "Suspended", "LowAcceptance"), "suspended", 60)
        await eventually(lambda: _told(pods, "Suspended", "Suspended"), "both are told")
        for pod in pods:
            pod.acceptance = 0.8
        await eventually(lambda: _told(pods, "Active", "Suspended"), "one tries it again", 60)
        await eventually(lambda: _says(rig, "Active", ""), "resumed", 60)
        await eventually(lambda: _told(pods, "Active", "Active"), "both are told")
    memory = json.loads((await rig.need("ConfigMap", "llama-policy"))["data"]["memory"])
    assert (memory["attempts"], memory["trial"]) == (0, "")
    events = await rig.events()
    assert events.count("SpeculationSuspended") == events.count("SpeculationResumed") == 1


@pytest.mark.soak
async def test_two_hundred_replicas_ride_out_a_rush(rig: Rig) -> None:
    clock = fast(5)
    await rig.operator(settings=AS_IT_IS, clock=clock)
    scaling = {"minReplicas": 40, "maxReplicas": 200, "targetConcurrency": 10, "scaleDownWindowSeconds": 60}
    saturation = {"disableAtConcurrency": 16, "enableAtConcurrency": 12}
    await rig.create(smallest(autoscaling=scaling, speculativeDecoding={"saturation": saturation}))
    await eventually(rig.is_settled, "children and status")
    service = _service(lambda now: 400.0 if 150 <= now < 400 else 60.0, 400.0)
    async with living(rig, service, clock) as fleet:
        await eventually(lambda: _ready(fleet, 40), "forty pods", 60)
        await eventually(lambda: _says(rig, "Suspended", "Saturated"), "suspended", 90)
        await eventually(lambda: _replicas(rig, 120, 200), "more than a hundred", 90)
        await eventually(lambda: _says(rig, "Active", ""), "resumed", 120)
        await eventually(lambda: _replicas(rig, 40, 45), "forty again", 120)
    assert (await rig.condition("Ready"))["status"] == "True"


async def test_kubectl_scale_sets_replicas(rig: Rig, namespace: str, kubectl: Callable[..., str]) -> None:
    await rig.operator()
    await rig.create(smallest(replicas=1))
    await eventually(rig.is_settled, "children and status")
    kubectl("scale", "specm/llama", "--replicas=3", "-n", namespace)
    await eventually(lambda: _replicas(rig, 3, 3), "three replicas")
    await eventually(lambda: _desired(rig, 3), "status says so")
    scale = json.loads(kubectl("get", "--raw", SCALE.format(namespace)))
    assert scale["spec"]["replicas"] == 3
    assert scale["status"]["selector"] == "outrider.dev/model=llama"


@pytest.fixture
async def controlled(control_plane_with_controllers: ControlPlane, namespace: str) -> AsyncIterator[Rig]:
    """The operator's rig on a control plane whose controllers, the HPA's among them, are at work."""
    plane = control_plane_with_controllers
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(INSTALL))
    plane.kubectl("wait", "--for=condition=Established", "crd/speculativemodels.outrider.dev", "--timeout=20s")
    account: Path = plane.kubeconfig_for_service_account(SYSTEM, "outrider-operator")
    settings = Settings(
        kubeconfig=str(account),
        namespaces=(namespace,),
        namespace=SYSTEM,
        leader_elect=False,
        health_port=0,
        metrics_port=0,
    )
    rig = Rig(Client(await load(str(plane.kubeconfig))), namespace, settings)
    try:
        yield rig
    finally:
        await rig.close()


@pytest.mark.soak
async def test_the_real_hpa_controller_scales_through_the_scale_subresource(
    controlled: Rig, namespace: str, kubectl: Callable[..., str]
) -> None:
    """Its bounds need no metrics: below minReplicas it scales up, above maxReplicas down."""
    await controlled.operator()
    await controlled.create(smallest(replicas=1))
    await eventually(controlled.is_settled, "children and status")
    target = "speculativemodels.outrider.dev/llama"
    kubectl("autoscale", target, "--min=3", "--max=5", "--cpu-percent=80", "-n", namespace)
    await eventually(lambda: _replicas(controlled, 3, 3), "the HPA's minimum", 60)
    kubectl(
        "patch", "hpa/llama", "-n", namespace, "--type=merge", "-p", '{"spec": {"minReplicas": 1, "maxReplicas": 2}}'
    )
    await eventually(lambda: _replicas(controlled, 2, 2), "the HPA's maximum", 60)
    assert (await controlled.need("SpeculativeModel", "llama"))["spec"]["replicas"] == 2


async def _ready(fleet: FastFleet, number: int) -> list[Pod]:
    pods = list(fleet.service.ready.values())
    return pods if len(pods) >= number else []


async def _says(rig: Rig, state: str, reason: str) -> bool:
    speculation = (await rig.status()).get("speculativeDecoding", {})
    return bool((speculation.get("state"), speculation.get("reason", "")) == (state, reason))


async def _told(pods: list[Pod], *states: str) -> bool:
    return sorted(pod.policy.state for pod in pods) == sorted(states)


async def _replicas(rig: Rig, least: int, most: int) -> bool:
    return bool(least <= (await rig.need("Deployment", "llama"))["spec"]["replicas"] <= most)


async def _desired(rig: Rig, number: int) -> bool:
    return (await rig.status()).get("desiredReplicas") == number
