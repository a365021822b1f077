"""From cached objects to Observed: the one place that knows where Kubernetes keeps what we look at. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from outrider_operator import labels
from outrider_operator.api.v1alpha1 import SpeculativeModelSpec
from outrider_operator.cache import Entry
from outrider_operator.fleet.samples import Fleet
from outrider_operator.observe import Child, Model, Observed, Pod
from outrider_operator.ownership import foreign_owner
from outrider_operator.render.meta import cache_name, policy_name

Body = Mapping[str, Any]
_USUAL_WAITS = frozenset({"ContainerCreating", "PodInitializing"})


def observe(
    model: Model,
    belongings: Iterable[Entry],
    fleet: Fleet,
    now: float,
    wall: datetime,
    conflicts: tuple[str, ...] = (),
    apply_error: str = "",
    status_written_at: float | None = None,
) -> Observed:
    """`belongings` are all objects that carry the model's label; those that are not its own are left out."""
    children: dict[str, Child] = {}
    pods: list[Pod] = []
    names = {model.name, policy_name(model.name), cache_name(model.name)}
    for entry in belongings:
        body = entry.body
        if entry.kind == "Pod":
            if _of_deployment(body, model.name):
                pods.append(pod_of(body))
        elif entry.key.name in names and foreign_owner(body, model) is None:
            children[entry.kind] = Child(
                kind=entry.kind,
                name=entry.key.name,
                hash=body["metadata"].get("annotations", {}).get(labels.HASH, ""),
                body=body,
            )
    return Observed(
        model=model,
        children=children,
        pods=tuple(sorted(pods, key=lambda pod: pod.name)),
        fleet=fleet,
        now=now,
        wall=wall,
        conflicts=conflicts,
        apply_error=apply_error,
        status_written_at=status_written_at,
    )


def model_of(body: Body) -> Model:
    metadata = body["metadata"]
    spec, refusal = None, ""
    try:
        spec = SpeculativeModelSpec.model_validate(body.get("spec", {}))
    except ValidationError as error:
        refusal = "; ".join(_words(each["loc"], each["msg"]) for each in error.errors(include_url=False))
    return Model(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        spec=spec,
        refusal=refusal,
        annotations=metadata.get("annotations", {}),
        status=body.get("status", {}),
        deleting="deletionTimestamp" in metadata,
    )


def _words(location: tuple[int | str, ...], message: str) -> str:
    path = ".".join(("spec", *map(str, location)))
    return f"{path}: {message.removeprefix('Value error, ')}"


def pod_of(body: Body) -> Pod:
    metadata, status = body["metadata"], body.get("status", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    waits = [c["state"]["waiting"] for c in containers if c.get("state", {}).get("waiting")]
    waiting = next((wait for wait in waits if wait.get("reason") not in _USUAL_WAITS), waits[0] if waits else {})
    ended = next(filter(None, map(_failure, containers)), {})
    return Pod(
        name=metadata["name"],
        ip=status.get("podIP", ""),
        template=metadata.get("labels", {}).get(labels.TEMPLATE, ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        phase=status.get("phase", ""),
        unschedulable=scheduled.get("message", "") if scheduled.get("status") == "False" else "",
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        exit_code=ended.get("exitCode"),
        termination_reason=ended.get("reason") or status.get("reason", ""),  # of the pod: Evicted, OutOfcpu, …
        termination_message=ended.get("message") or (status.get("message", "") if not ended else ""),
        restarts=sum(container.get("restartCount", 0) for container in containers),
        created=metadata.get("creationTimestamp", ""),
    )


def _failure(container: Body) -> Body | None:
    """How the container ended last, unless it ended well."""
    ends = (container.get(state, {}).get("terminated") for state in ("state", "lastState"))
    return next((end for end in ends if end and end.get("exitCode") != 0), None)


def _of_deployment(body: Body, name: str) -> bool:
    """The label alone would do for anybody's pod, and to such a one the admin token must not be shown."""
    return any(
        owner.get("controller") and owner["kind"] == "ReplicaSet" and owner["name"].startswith(f"{name}-")
        for owner in body["metadata"].get("ownerReferences", ())
    )
