from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from outrider_operator.cache import Entry, pack
from outrider_operator.fleet.samples import Fleet
from outrider_operator.observation import model_of, observe, pod_of
from outrider_operator.observe import Model, Observed
from outrider_operator.render.meta import metadata

SPEC = {"model": {"uri": "hf://Qwen/Qwen2.5-7B-Instruct"}}
MODEL = Model(namespace="team", name="llama", uid="u1", generation=1, spec=None)


def body(**more: Any) -> dict[str, Any]:
    meta = {"namespace": "team", "name": "llama", "uid": "u1", "generation": 3}
    return {"metadata": meta | more.pop("metadata", {}), "spec": SPEC} | more


def belonging(kind: str, name: str, owner: Model | None = MODEL, **more: Any) -> Entry:
    meta = metadata(owner or MODEL, name, owned=owner is not None)
    meta |= {"uid": name, "resourceVersion": "1"} | more.pop("metadata", {})
    return pack({"apiVersion": "v1", "kind": kind, "metadata": meta, **more})


def pod(name: str = "llama-1", **status: Any) -> Entry:
    owner = {"kind": "ReplicaSet", "name": "llama-6d4", "uid": "r", "controller": True}
    return belonging("Pod", name, None, metadata={"ownerReferences": [owner]}, status=status)


def seen(*belongings: Entry) -> Observed:
    return observe(MODEL, belongings, Fleet(), 0.0, datetime(2026, 1, 1, tzinfo=UTC))


def test_a_model_carries_what_decisions_read() -> None:
    model = model_of(body(metadata={"annotations": {"outrider.dev/upgrade": "1"}}, status={"observedGeneration": 2}))
    assert (model.namespace, model.name, model.uid, model.generation) == ("team", "llama", "u1", 3)
    assert model.spec is not None
    assert model.annotations == {"outrider.dev/upgrade": "1"}
    assert model.status == {"observedGeneration": 2}
    assert not model.deleting


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "spec.model: Field required"),
        (SPEC | {"replicas": -1}, "spec.replicas: Input should be greater than or equal to 0"),
        (SPEC | {"unknown": 1}, "spec.unknown: Extra inputs are not permitted"),
    ],
)
def test_a_spec_that_does_not_parse_is_refused_with_field_and_fix(spec: dict[str, Any], words: str) -> None:
    model = model_of(body() | {"spec": spec})
    assert model.spec is None
    assert words in model.refusal


def test_children_are_found_by_kind() -> None:
    deployment = belonging("Deployment", "llama", metadata={"annotations": {"outrider.dev/hash": "h"}})
    observed = seen(deployment, belonging("ConfigMap", "llama-policy"))
    assert set(observed.children) == {"Deployment", "ConfigMap"}
    assert observed.children["Deployment"].hash == "h"


def test_what_carries_the_label_but_belongs_to_another_is_no_child() -> None:
    other = Model(namespace="team", name="other", uid="u2", generation=1, spec=None)
    assert seen(belonging("Deployment", "llama", other)).children == {}


def test_a_claim_left_by_a_predecessor_is_a_child_again() -> None:
    assert set(seen(belonging("PersistentVolumeClaim", "llama-cache", None)).children) == {"PersistentVolumeClaim"}


def test_a_pod_that_only_borrows_the_label_is_no_pod_of_the_model() -> None:
    assert [p.name for p in seen(pod("llama-1"), belonging("Pod", "borrowed", None)).pods] == ["llama-1"]


def test_a_ready_pod_is_told_apart() -> None:
    ready = pod(phase="Running", podIP="10.0.0.1", conditions=[{"type": "Ready", "status": "True"}])
    observed = pod_of(ready.body)
    assert (observed.ready, observed.ip, observed.phase, observed.deleting) == (True, "10.0.0.1", "Running", False)


def test_why_a_pod_is_not_scheduled_is_kept() -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient nvidia.com/gpu"}
    assert pod_of(pod(conditions=[condition]).body).unschedulable == "0/1 nodes: Insufficient nvidia.com/gpu"


def test_the_telling_wait_counts_not_the_usual_one() -> None:
    statuses = [
        {"name": "a", "state": {"waiting": {"reason": "PodInitializing"}}},
        {"name": "b", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}},
    ]
    observed = pod_of(pod(containerStatuses=statuses).body)
    assert (observed.waiting_reason, observed.waiting_message) == ("ImagePullBackOff", "no such image")


def test_how_a_container_ended_is_kept_with_its_last_words() -> None:
    ended = {"terminated": {"exitCode": 76, "reason": "Error", "message": "TokenizerMismatch: token 5"}}
    status = {
        "name": "server",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": ended,
        "restartCount": 3,
    }
    observed = pod_of(pod(containerStatuses=[status]).body)
    assert (observed.exit_code, observed.termination_reason) == (76, "Error")
    assert observed.termination_message == "TokenizerMismatch: token 5"
    assert (observed.restarts, observed.waiting_reason) == (3, "CrashLoopBackOff")


def test_a_pod_that_the_node_refused_says_why() -> None:
    observed = pod_of(pod(phase="Failed", reason="Evicted", message="the node was low on memory").body)
    assert observed.exit_code is None
    created = {"creationTimestamp": "2026-01-01T00:00:00Z"}
    assert pod_of(belonging("Pod", "llama-1", None, metadata=created).body).created == "2026-01-01T00:00:00Z"
    assert (observed.termination_reason, observed.termination_message) == ("Evicted", "the node was low on memory")


def test_a_container_that_ended_well_is_no_failure() -> None:
    status = {"name": "init", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    assert pod_of(pod(initContainerStatuses=[status]).body).exit_code is None
