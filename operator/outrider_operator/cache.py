"""What the watches have shown: objects by key and by the SpeculativeModel they belong to, small and never stale.

Our own dictionaries instead of kopf's index, whose start-up is quadratic. Each object is cut to what decisions read
and kept as compact JSON, so memory is linear in the objects and nobody can change a cached value by accident.
Resource versions of one kind are comparable (KEP-5504): frames may come late, twice or in any order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider_operator import labels
from outrider_operator.kinds import MODEL


class Key(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One object. `model` is the key of the SpeculativeModel it belongs to, or its own key for one."""

    kind: str
    key: Key
    uid: str
    version: int
    model: Key
    controller: str  # uid of the owner that controls it, or empty
    packed: str

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.packed)
        body["metadata"]["resourceVersion"] = str(self.version)
        return body


@dataclass(frozen=True, slots=True)
class Changes:
    """What a fresh list taught us. `missed` counts what the watch should have said and did not, or not yet."""

    models: frozenset[Key]
    missed: int


class Cache:
    def __init__(self) -> None:
        self._objects: dict[str, dict[Key, Entry]] = {}
        self._by_model: dict[Key, dict[tuple[str, Key], Entry]] = {}
        self._gone: dict[tuple[str, Key], int] = {}  # version at which an object was last seen to be gone
        self._listed: dict[tuple[str, str | None], int] = {}

    def get(self, kind: str, key: Key) -> Entry | None:
        return self._objects.get(kind, {}).get(key)

    def of_model(self, model: Key) -> list[Entry]:
        """Everything that belongs to the model, itself not included."""
        return [entry for entry in self._by_model.get(model, {}).values() if entry.kind != MODEL]

    def models(self) -> list[Key]:
        return list(self._objects.get(MODEL, ()))

    def count(self) -> dict[str, int]:
        return {kind: len(objects) for kind, objects in self._objects.items()}

    def put(self, body: Mapping[str, Any]) -> frozenset[Key]:
        """Take in an object as it is now; the models that have something new to look at are returned."""
        known = self.get(body["kind"], _key(body))
        if known and known.version >= _version(body):
            return frozenset()  # most frames say what the answer to our own write has said already
        return self._put(pack(body))

    def remove(self, body: Mapping[str, Any]) -> frozenset[Key]:
        """Take in that an object is gone, or no longer carries our label; `body` is its last state."""
        entry = pack(body)
        return self._remove(entry.kind, entry.key, entry.version)

    def replace(self, kind: str, namespace: str | None, entries: Iterable[Entry], version: int) -> Changes:
        """Take in a whole list of `kind` in `namespace` (None: everywhere), complete at `version`."""
        objects = self._objects.setdefault(kind, {})
        listed: set[Key] = set()
        models: set[Key] = set()
        missed = 0
        for entry in entries:
            listed.add(entry.key)
            known = objects.get(entry.key)
            missed += known is None or known.version < entry.version
            models |= self._put(entry)
        absent = [
            key
            for key, entry in objects.items()
            if key not in listed and entry.version <= version and namespace in (None, key.namespace)
        ]
        for key in absent:
            models |= self._remove(kind, key, version)
        self._forget_tombstones(kind, namespace, version)
        return Changes(frozenset(models), missed + len(absent))

    def _put(self, entry: Entry) -> frozenset[Key]:
        objects = self._objects.setdefault(entry.kind, {})
        known = objects.get(entry.key)
        if entry.version < self._gone.get((entry.kind, entry.key), 0) or (known and known.version >= entry.version):
            return frozenset()
        objects[entry.key] = entry
        if known and known.model != entry.model:
            self._unindex(known)
        self._by_model.setdefault(entry.model, {})[entry.kind, entry.key] = entry
        if known and known.packed == entry.packed and known.model == entry.model:
            return frozenset()  # only its version or something nobody reads has changed
        return frozenset({entry.model} | ({known.model} if known else set()))

    def _remove(self, kind: str, key: Key, version: int) -> frozenset[Key]:
        known = self.get(kind, key)
        if known and known.version > version:
            return frozenset()
        self._gone[kind, key] = max(version, self._gone.get((kind, key), 0))
        if known is None:
            return frozenset()
        del self._objects[kind][key]
        self._unindex(known)
        return frozenset({known.model})

    def _unindex(self, entry: Entry) -> None:
        belongings = self._by_model[entry.model]
        del belongings[entry.kind, entry.key]
        if not belongings:
            del self._by_model[entry.model]

    def _forget_tombstones(self, kind: str, namespace: str | None, version: int) -> None:
        """A frame may be late by up to one list's interval; older tombstones have no more to guard against."""
        before = self._listed.get((kind, namespace), 0)
        self._listed[kind, namespace] = version
        for gone in [g for g, at in self._gone.items() if g[0] == kind and at < before]:
            if namespace in (None, gone[1].namespace):
                del self._gone[gone]


_METADATA = (
    "name",
    "namespace",
    "uid",
    "generation",
    "labels",
    "ownerReferences",
    "deletionTimestamp",
    "creationTimestamp",
)
_BULKY = frozenset({"kubectl.kubernetes.io/last-applied-configuration", "deployment.kubernetes.io/revision"})


def pack(body: Mapping[str, Any]) -> Entry:
    """Cut an object to what decisions read."""
    kind, metadata, key = body["kind"], body["metadata"], _key(body)
    kept: dict[str, Any] = {"apiVersion": body["apiVersion"], "kind": kind, "metadata": _metadata(metadata)}
    if kind == "Pod":
        kept["status"] = _pod_status(body.get("status", {}))
    else:
        kept |= {field: body[field] for field in ("spec", "data", "status") if field in body}
    if kind == "Deployment":
        kept["metadata"]["managedFields"] = _replica_owners(metadata)
    model = (
        key if kind == MODEL else Key(key.namespace, metadata.get("labels", {}).get(labels.MODEL) or _owner(metadata))
    )
    packed = json.dumps(kept, separators=(",", ":"), ensure_ascii=False)
    controller = next((str(o["uid"]) for o in metadata.get("ownerReferences", ()) if o.get("controller")), "")
    return Entry(kind, key, metadata["uid"], _version(body), model, controller, packed)


def _key(body: Mapping[str, Any]) -> Key:
    return Key(body["metadata"]["namespace"], body["metadata"]["name"])


def _version(body: Mapping[str, Any]) -> int:
    return int(body["metadata"]["resourceVersion"])


def _metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    kept = {field: metadata[field] for field in _METADATA if field in metadata}
    annotations = {name: text for name, text in metadata.get("annotations", {}).items() if name not in _BULKY}
    return kept | ({"annotations": annotations} if annotations else {})


def _owner(metadata: Mapping[str, Any]) -> str:
    return next((str(o["name"]) for o in metadata.get("ownerReferences", ()) if o["kind"] == MODEL), "")


def _replica_owners(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of managedFields, which is most of an object, only who owns spec.replicas."""
    return [
        {
            "manager": entry.get("manager", ""),
            "operation": entry.get("operation", ""),
            "subresource": entry.get("subresource", ""),
            "fieldsV1": {"f:spec": {"f:replicas": {}}},
        }
        for entry in metadata.get("managedFields", ())
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    ]


def _pod_status(status: Mapping[str, Any]) -> dict[str, Any]:
    kept = {field: status[field] for field in ("phase", "podIP", "reason", "message") if field in status}
    kept["conditions"] = [
        {field: condition.get(field, "") for field in ("type", "status", "reason", "message")}
        for condition in status.get("conditions", ())
        if condition.get("type") in ("Ready", "PodScheduled")
    ]
    for field in ("initContainerStatuses", "containerStatuses"):
        kept[field] = [
            {part: container[part] for part in ("name", "state", "lastState", "restartCount") if part in container}
            for container in status.get(field, ())
        ]
    return kept
