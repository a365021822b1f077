"""The operator and the pods: policies reach runtimes, load suspends speculation and its fall resumes it, and all of it
is said in status and events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.cluster.operator_rig import Rig, Runtime, eventually, smallest

pytest_plugins = ["tests.cluster.operator_fixtures"]

SATURATION = {"disableAtConcurrency": 4, "enableAtConcurrency": 2, "stabilizationWindowSeconds": 1}


async def _serving(rig: Rig, runtime: Runtime, pod: str = "llama-1-a") -> None:
    """The pod runs, ready, with the policy it read at its start."""
    runtime.token = await rig.token()
    runtime.load_policy(await rig.need("ConfigMap", "llama-policy"))
    await rig.pod(pod, runtime.address)
    await rig.rolled_out()


async def _state(rig: Rig) -> str:
    return str((await rig.status()).get("speculativeDecoding", {}).get("state", ""))


async def test_load_suspends_speculation_and_its_fall_resumes_it(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest(speculativeDecoding={"saturation": SATURATION}))
    await eventually(rig.is_settled, "children and status")
    async with Runtime("") as runtime:
        await _serving(rig, runtime)
        await eventually(lambda: _is(rig, "Ready", "True"), "Ready")
        assert await _state(rig) == "Active"
        assert runtime.puts == []  # it read the policy that is in force

        runtime.running = 6
        await eventually(lambda: _says(rig, "Suspended"), "Suspended", 40)
        assert (await rig.status())["speculativeDecoding"]["reason"] == "Saturated"
        await eventually(lambda: _told(runtime, "Suspended"), "the pod is told")
        policy = json.loads((await rig.need("ConfigMap", "llama-policy"))["data"]["policy"])
        assert runtime.policy == policy
        await eventually(lambda: _is(rig, "SpeculationActive", "False", "Saturated"), "the condition")
        assert (await rig.condition("Ready"))["status"] == "True"

        runtime.running = 1
        await eventually(lambda: _says(rig, "Active"), "Active again", 40)
        await eventually(lambda: _told(runtime, "Active"), "the pod is told")
    events = await rig.events()
    assert events.count("SpeculationSuspended") == 1
    assert events.count("SpeculationResumed") == 1
    assert events.count("ModelLoaded") == 1


async def test_a_change_of_mode_reaches_every_pod_and_restarts_none(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest(replicas=2))
    await eventually(rig.is_settled, "children and status")
    async with Runtime("") as one, Runtime("") as two:
        await _serving(rig, one, "llama-1-a")
        await _serving(rig, two, "llama-1-b")
        before = (await rig.need("Deployment", "llama"))["metadata"]["generation"]

        def disable(body: dict[str, Any]) -> None:
            body["spec"]["speculativeDecoding"]["mode"] = "Disabled"

        def shorten(body: dict[str, Any]) -> None:
            body["spec"]["speculativeDecoding"] |= {"mode": "Auto", "numSpeculativeTokens": 2}

        for change, state, tokens in ((disable, "Disabled", 4), (shorten, "Active", 2)):
            await rig.edit("SpeculativeModel", "llama", change)
            for runtime in (one, two):
                await eventually(lambda r=runtime, s=state, t=tokens: _told(r, s, t), "both are told", 10)
        assert (await rig.need("Deployment", "llama"))["metadata"]["generation"] == before


async def test_a_pod_that_missed_a_policy_is_told_when_it_answers_again(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    async with Runtime("") as runtime:
        await _serving(rig, runtime)
        runtime.body["policy"] = {**runtime.policy, "revision": "stale"}
        await eventually(lambda: _told(runtime, "Active"), "it is told")
        assert runtime.policy["revision"] != "stale"


async def test_a_deleted_admin_secret_is_made_anew_and_pods_still_listen(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    async with Runtime("") as runtime:
        await _serving(rig, runtime)
        await rig.delete("Secret", "llama-admin")
        runtime.token = "a token that nobody else knows"
        runtime.body["policy"] = {**runtime.policy, "revision": "stale"}
        await eventually(lambda: _exists(rig, "Secret", "llama-admin"), "a new Secret")
        runtime.token = await rig.token()  # the kubelet refreshes the mount
        await eventually(lambda: _told(runtime, "Active"), "it is told with the new token")


async def test_pods_that_do_not_answer_change_nothing_and_hold_up_nobody(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    async with Runtime("") as runtime:
        address = runtime.address
    await rig.pod("llama-1-a", address)  # nobody listens there
    await rig.rolled_out()
    await eventually(lambda: _is(rig, "SpeculationActive", "Unknown"), "the condition says so", 40)
    assert await _state(rig) == "Active"
    await rig.create(smallest("other"))
    await eventually(lambda: rig.is_settled("other"), "another object is served")


async def test_after_a_restart_a_suspension_is_remembered(rig: Rig) -> None:
    first = await rig.operator()
    await rig.create(smallest(speculativeDecoding={"saturation": SATURATION}))
    await eventually(rig.is_settled, "children and status")
    async with Runtime("") as runtime:
        await _serving(rig, runtime)
        runtime.running = 6
        await eventually(lambda: _says(rig, "Suspended"), "Suspended", 40)
        await eventually(lambda: _told(runtime, "Suspended"), "the pod is told")
        await first.stop()
        puts = len(runtime.puts)
        second = await rig.operator()
        await eventually(lambda: _measured(runtime), "it is measured again")
        await rig.create(smallest("other"))
        await eventually(lambda: rig.is_settled("other"), "work goes on")
        assert await _state(rig) == "Suspended"
        assert len(runtime.puts) == puts
        assert ("apply", "ConfigMap", "llama-policy") not in second.kube.writes
        assert (await rig.events()).count("SpeculationSuspended") == 1


@pytest.mark.soak
async def test_load_adds_replicas(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest(autoscaling={"minReplicas": 1, "maxReplicas": 3, "targetConcurrency": 2}))
    await eventually(rig.is_settled, "children and status")
    async with Runtime("") as runtime:
        await _serving(rig, runtime)
        runtime.running, runtime.waiting = 2, 3
        await eventually(lambda: _replicas(rig, 3), "three replicas", 60)
        autoscaling = await eventually(lambda: _decided(rig), "the decision in status")
        assert autoscaling["recentDecisions"][0]["from"] == 1
        assert "ScaledUp" in await rig.events()


async def _replicas(rig: Rig, number: int) -> bool:
    return bool((await rig.need("Deployment", "llama"))["spec"]["replicas"] == number)


async def _decided(rig: Rig) -> dict[str, Any]:
    return dict((await rig.status()).get("autoscaling", {}))


async def _says(rig: Rig, state: str) -> bool:
    return await _state(rig) == state


async def _told(runtime: Runtime, state: str, tokens: int = 4) -> bool:
    last = runtime.puts[-1] if runtime.puts else {}
    return (last.get("state"), last.get("numSpeculativeTokens")) == (state, tokens)


async def _measured(runtime: Runtime) -> bool:
    before = runtime.body["counters"]["uptime_seconds"]
    await asyncio.sleep(0.1)
    return bool(runtime.body["counters"]["uptime_seconds"] > before)


async def _exists(rig: Rig, kind: str, name: str) -> bool:
    return await rig.get(kind, name) is not None


async def _is(rig: Rig, kind: str, status: str, reason: str = "") -> dict[str, Any]:
    condition = await rig.condition(kind)
    return condition if condition.get("status") == status and reason in ("", condition["reason"]) else {}
