"""The operator on a real API server, with the rights of manifests/install and nobody else at work: no controllers, no
kubelet. Tests play them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.operator_rig import CHILDREN, Rig, eventually, smallest

from outrider_operator import labels

pytest_plugins = ["tests.cluster.operator_fixtures"]


async def test_an_object_becomes_children_and_a_status(rig: Rig) -> None:
    await rig.operator()
    model = await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    for kind, pattern in CHILDREN:
        child = await rig.need(kind, pattern.format("llama"))
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["uid"] == model["metadata"]["uid"]
        assert owner["controller"] is True
        assert child["metadata"]["labels"][labels.MODEL] == "llama"
        assert "finalizers" not in child["metadata"]
    status = await rig.status()
    assert status["observedGeneration"] == 1
    assert status["selector"] == "outrider.dev/model=llama"
    assert status["desiredReplicas"] == 1
    assert (await rig.condition("Accepted"))["status"] == "True"
    assert (await rig.condition("Ready"))["status"] == "False"


async def test_the_users_object_gets_a_status_and_nothing_else(rig: Rig) -> None:
    await rig.operator()
    before = await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    after = await rig.need("SpeculativeModel", "llama")
    assert after["spec"] == before["spec"]
    assert "annotations" not in after["metadata"]
    assert "finalizers" not in after["metadata"]
    managers = {entry["manager"]: entry.get("subresource") for entry in after["metadata"]["managedFields"]}
    assert managers["outrider-operator"] == "status"


async def test_objects_that_were_there_before_the_operator_are_reconciled(rig: Rig) -> None:
    await rig.create(smallest("one"))
    await rig.create(smallest("two"))
    await rig.operator()
    for name in ("one", "two"):
        await eventually(lambda name=name: rig.is_settled(name), name)


async def test_a_restart_over_objects_in_sync_writes_nothing(rig: Rig) -> None:
    first = await rig.operator()
    for name in ("one", "two", "three"):
        await rig.create(smallest(name))
        await eventually(lambda name=name: rig.is_settled(name), name)
    await first.stop()
    before = await rig.versions()
    second = await rig.operator(settings={"relist_seconds": 1})
    await eventually(lambda: _all_seen(second, ("one-admin", "two-admin", "three-admin")), "every object was looked at")
    await rig.create(smallest("four"))  # work done after all of the above
    await eventually(lambda: rig.is_settled("four"), "four")
    assert {call for call in second.kube.writes if "four" not in call[2]} == set()
    after = await rig.versions()
    assert {name: version for name, version in after.items() if "four" not in name} == before


async def test_fields_changed_by_hand_are_repaired(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")

    def break_service(body: dict[str, Any]) -> None:
        body["spec"]["ports"][0]["port"] = 9999

    def break_deployment(body: dict[str, Any]) -> None:
        body["spec"]["template"]["spec"]["containers"][0]["image"] = "somebody/elses"
        body["spec"]["replicas"] = 7

    await rig.edit("Service", "llama", break_service)
    await rig.edit("Deployment", "llama", break_deployment)

    async def repaired() -> bool:
        service, deployment = await rig.need("Service", "llama"), await rig.need("Deployment", "llama")
        image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
        replicas = deployment["spec"]["replicas"]
        return service["spec"]["ports"][0]["port"] == 80 and image != "somebody/elses" and replicas == 1

    await eventually(repaired, "both are repaired")


@pytest.mark.parametrize("kind", ["ConfigMap", "Deployment", "Service", "PodDisruptionBudget"])
async def test_a_deleted_child_is_made_anew(rig: Rig, kind: str) -> None:
    await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    name = dict(CHILDREN)[kind].format("llama")
    before = (await rig.need(kind, name))["metadata"]["uid"]
    await rig.delete(kind, name)

    async def anew() -> bool:
        body = await rig.get(kind, name)
        return body is not None and body["metadata"]["uid"] != before

    await eventually(anew, f"{kind} is made anew")


async def test_a_child_whose_label_and_owner_were_taken_off_gets_them_back(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")

    def strip(body: dict[str, Any]) -> None:
        del body["metadata"]["labels"][labels.MODEL]

    await rig.edit("Service", "llama", strip)

    async def back() -> bool:
        service = await rig.need("Service", "llama")
        return service["metadata"]["labels"].get(labels.MODEL) == "llama"

    await eventually(back, "the label is back")


async def test_what_others_add_to_a_child_is_theirs(rig: Rig) -> None:
    operator = await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")

    def add(body: dict[str, Any]) -> None:
        body["metadata"].setdefault("annotations", {})["team.example/note"] = "hello"
        body["metadata"]["labels"]["team.example/tier"] = "gold"

    operator.kube.calls.clear()
    await rig.edit("Service", "llama", add)
    await rig.create(smallest("later"))
    await eventually(lambda: rig.is_settled("later"), "later")
    assert ("apply", "Service", "llama") not in operator.kube.writes
    assert (await rig.need("Service", "llama"))["metadata"]["annotations"]["team.example/note"] == "hello"


@pytest.mark.parametrize(("kind", "pattern"), CHILDREN)
async def test_a_name_owned_by_somebody_else_is_refused_and_nothing_is_made(rig: Rig, kind: str, pattern: str) -> None:
    name = pattern.format("llama")
    theirs = await rig.create(_foreign(kind, name))
    operator = await rig.operator()
    await rig.create(smallest())
    accepted = await eventually(lambda: rig.condition("Accepted"), "a verdict")
    assert (accepted["status"], accepted["reason"]) == ("False", "NameConflict")
    assert f"{kind} {name}" in accepted["message"]
    assert (await rig.need(kind, name))["metadata"]["resourceVersion"] == theirs["metadata"]["resourceVersion"]
    assert {verb for verb, its, _ in operator.kube.writes if its not in ("Event", "SpeculativeModel")} <= {"create"}
    others = [(k, p) for k, p in CHILDREN if k != kind]
    assert [k for k, p in others if await rig.get(k, p.format("llama"))] == []
    assert "Refused" in await rig.events()
    assert (await rig.status())["observedGeneration"] == 1

    await rig.delete(kind, name)
    await eventually(rig.is_settled, "it goes on when the name is free", 60)
    await eventually(lambda: _is(rig, "Accepted", "True"), "it is accepted")


async def test_a_spec_that_only_the_operator_can_refuse_says_why_and_leaves_what_runs(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    before = await rig.need("Deployment", "llama")

    def ask_too_much(body: dict[str, Any]) -> None:
        body["spec"]["engine"]["tensorParallelSize"] = 4

    await rig.edit("SpeculativeModel", "llama", ask_too_much)
    await eventually(lambda: _is(rig, "Accepted", "False", "UnsupportedParallelism"), "it is refused")
    assert (await rig.status())["observedGeneration"] == 2
    after = await rig.need("Deployment", "llama")
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


async def test_what_the_api_server_refuses_is_said_in_status(rig: Rig) -> None:
    await rig.operator()
    toleration = {"key": "a", "operator": "Exists", "value": "must be empty"}
    await rig.create(smallest(tolerations=[toleration]))
    accepted = await eventually(lambda: _is(rig, "Accepted", "False", "ApplyFailed"), "the refusal")
    assert "tolerations" in accepted["message"]

    def correct(body: dict[str, Any]) -> None:
        del body["spec"]["tolerations"]

    await rig.edit("SpeculativeModel", "llama", correct)
    await eventually(lambda: _is(rig, "Accepted", "True"), "it is accepted")
    await eventually(rig.is_settled, "children and status")


async def test_a_claim_that_may_not_grow_holds_up_no_other_change(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest(cache={"size": "1Gi"}))
    await eventually(rig.is_settled, "children and status")

    def grow(body: dict[str, Any]) -> None:
        body["spec"]["cache"]["size"] = "2Gi"  # nothing binds the claim here, and an unbound one is immutable
        body["spec"]["replicas"] = 2

    await rig.edit("SpeculativeModel", "llama", grow)
    accepted = await eventually(lambda: _is(rig, "Accepted", "False", "ApplyFailed"), "the refusal")
    assert "persistentvolumeclaims/llama-cache" in accepted["message"]
    assert (await rig.need("Deployment", "llama"))["spec"]["replicas"] == 2


async def test_changes_that_may_not_roll_do_not_and_the_others_do(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    before = await rig.need("Deployment", "llama")

    def toggle(body: dict[str, Any]) -> None:
        body["spec"]["speculativeDecoding"] = {"mode": "Disabled", "numSpeculativeTokens": 3}
        body["spec"]["replicas"] = 3

    await rig.edit("SpeculativeModel", "llama", toggle)
    await eventually(rig.is_settled, "children and status")
    toggled = await rig.need("Deployment", "llama")
    assert toggled["spec"]["template"] == before["spec"]["template"]
    assert toggled["spec"]["replicas"] == 3
    policy = (await rig.need("ConfigMap", "llama-policy"))["data"]["policy"]
    assert '"state": "Disabled"' in policy

    def move(body: dict[str, Any]) -> None:
        body["spec"]["model"]["uri"] = "pvc://models/other"

    await rig.edit("SpeculativeModel", "llama", move)
    await eventually(rig.is_settled, "children and status")
    assert (await rig.need("Deployment", "llama"))["spec"]["template"] != before["spec"]["template"]


async def test_suspend_means_no_replicas_and_ready(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest(replicas=2))
    await eventually(rig.is_settled, "children and status")

    def suspend(body: dict[str, Any], value: bool = True) -> None:
        body["spec"]["suspend"] = value

    await rig.edit("SpeculativeModel", "llama", suspend)
    await eventually(lambda: _has_replicas(rig, 0), "no replicas")
    await rig.rolled_out(replicas=0)
    await eventually(lambda: _is(rig, "Ready", "True", "Suspended"), "Ready with reason Suspended")
    assert await rig.get("Service", "llama") is not None
    await rig.edit("SpeculativeModel", "llama", lambda body: suspend(body, False))
    await eventually(lambda: _has_replicas(rig, 2), "its replicas again")


async def test_the_scale_subresource_sets_replicas(rig: Rig, kubectl: Any) -> None:
    await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    kubectl("-n", rig.namespace, "scale", "specm/llama", "--replicas=4")
    await eventually(lambda: _has_replicas(rig, 4), "four replicas")


async def test_pods_that_fail_explain_themselves_in_status(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    await rig.pod("llama-1-a", "127.0.0.1", ready=False)
    ended = {"exitCode": 66, "reason": "Error", "message": "ModelNotFound: pvc://models/tiny: no such folder"}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    container = {"name": "server", "image": "none", "imageID": "", "ready": False, "restartCount": 3}
    container |= {"state": waiting, "lastState": {"terminated": ended}}
    await rig.set_status("Pod", "llama-1-a", {"phase": "Running", "containerStatuses": [container]})
    await eventually(lambda: _is(rig, "ModelReady", "False", "ModelNotFound"), "the reason in words")
    assert "no such folder" in (await rig.condition("ModelReady"))["message"]


async def test_a_deleted_object_is_forgotten_and_the_same_name_can_come_back(rig: Rig) -> None:
    operator = await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    await rig.delete("SpeculativeModel", "llama")
    for kind, pattern in CHILDREN:  # nobody else is here to collect them
        await rig.delete(kind, pattern.format("llama"))
    operator.kube.calls.clear()
    await rig.create(smallest("other"))
    await eventually(lambda: rig.is_settled("other"), "other")
    assert [call for call in operator.kube.writes if "other" not in call[2]] == []
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status again")


async def test_children_of_a_deleted_object_are_not_taken_over_by_its_successor(rig: Rig) -> None:
    await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    old = await rig.need("Deployment", "llama")
    await rig.delete("SpeculativeModel", "llama")
    successor = await rig.create(smallest())
    for kind, pattern in CHILDREN:
        await rig.delete(kind, pattern.format("llama"))  # what the garbage collector would do, late
    await eventually(rig.is_settled, "children and status again", 40)
    new = await rig.need("Deployment", "llama")
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert new["metadata"]["ownerReferences"][0]["uid"] == successor["metadata"]["uid"]


def _foreign(kind: str, name: str) -> dict[str, Any]:
    body: dict[str, Any] = {"kind": kind, "metadata": {"name": name, "labels": {"app": "theirs"}}}
    selector = {"matchLabels": {"app": "theirs"}}
    match kind:
        case "Deployment":
            pod = {"metadata": {"labels": {"app": "theirs"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
            return body | {"apiVersion": "apps/v1", "spec": {"selector": selector, "template": pod}}
        case "PodDisruptionBudget":
            return body | {"apiVersion": "policy/v1", "spec": {"selector": selector, "minAvailable": 1}}
        case "Service":
            return body | {"apiVersion": "v1", "spec": {"ports": [{"port": 1234}]}}
        case _:
            return body | {"apiVersion": "v1"}


async def _is(rig: Rig, kind: str, status: str, reason: str = "") -> dict[str, Any]:
    condition = await rig.condition(kind)
    return condition if condition.get("status") == status and reason in ("", condition["reason"]) else {}


async def _has_replicas(rig: Rig, number: int) -> bool:
    return bool((await rig.need("Deployment", "llama"))["spec"]["replicas"] == number)


async def _all_seen(operator: Any, names: tuple[str, ...]) -> bool:
    return {name for verb, kind, name in operator.kube.calls if (verb, kind) == ("get", "Secret")} >= set(names)
