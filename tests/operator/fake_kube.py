"""An API server in a dictionary, for tests of the rim that need no real one: versions, uids, owners, preconditions."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from outrider_operator import labels
from outrider_operator.errors import Conflict, NotFound
from outrider_operator.kinds import KINDS
from outrider_operator.kube import Page

Body = Mapping[str, Any]


class FakeKube:
    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.calls: list[tuple[str, str, str]] = []  # verb, kind, name
        self.version = 100
        self.fault: Callable[[str, str, str], None] = lambda verb, kind, name: None  # may raise

    @property
    def writes(self) -> list[tuple[str, str, str]]:
        return [call for call in self.calls if call[0] not in ("get", "list")]

    def put(self, body: Body) -> dict[str, Any]:
        """Somebody else's write."""
        return self._store(copy.deepcopy(dict(body)))

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        self._call("get", kind, name)
        return copy.deepcopy(self._find(kind, namespace, name))

    peek = get

    async def pages(self, kind: str, namespace: str | None) -> AsyncIterator[Page]:
        self._call("list", kind, "")
        items = [
            copy.deepcopy(body)
            for (its, where, _), body in self.objects.items()
            if its == kind
            and namespace in (None, where)
            and (not KINDS[kind].selector or labels.MODEL in body["metadata"].get("labels", {}))
        ]
        half = len(items) // 2
        yield Page(items[:half], self.version)
        yield Page(items[half:], self.version)

    async def create(self, body: Body) -> dict[str, Any]:
        kind, metadata = body["kind"], body["metadata"]
        self._call("create", kind, metadata["name"])
        if (kind, metadata["namespace"], metadata["name"]) in self.objects:
            raise Conflict("already exists")
        return self._store(copy.deepcopy(dict(body)))

    async def apply(self, body: Body) -> dict[str, Any]:
        kind, metadata = body["kind"], body["metadata"]
        self._call("apply", kind, metadata["name"])
        live = self.objects.get((kind, metadata["namespace"], metadata["name"]))
        wanted = metadata.get("uid")
        if wanted and (live is None or live["metadata"]["uid"] != wanted):
            raise Conflict("uid mismatch")
        return self._store(_merged(live or {}, body))

    async def overwrite(self, body: Body) -> dict[str, Any]:
        self._call("overwrite", body["kind"], body["metadata"]["name"])
        live = self._find(body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
        return self._store(_merged(live, body))

    async def apply_status(self, body: Body) -> dict[str, Any]:
        self._call("apply_status", body["kind"], body["metadata"]["name"])
        live = self._find(body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
        return self._store({**copy.deepcopy(live), "status": copy.deepcopy(body["status"])})

    async def update(self, body: Body) -> dict[str, Any]:
        kind, metadata = body["kind"], body["metadata"]
        self._call("update", kind, metadata["name"])
        live = self._find(kind, metadata["namespace"], metadata["name"])
        if metadata.get("resourceVersion") not in (None, live["metadata"]["resourceVersion"]):
            raise Conflict("the object has been modified")
        return self._store(copy.deepcopy(dict(body)))

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        self._call("delete", kind, name)
        live = self._find(kind, namespace, name)
        if live["metadata"]["uid"] != uid:
            raise Conflict("uid mismatch")
        del self.objects[kind, namespace, name]

    def _call(self, verb: str, kind: str, name: str) -> None:
        self.fault(verb, kind, name)
        self.calls.append((verb, kind, name))

    def _find(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        try:
            return self.objects[kind, namespace, name]
        except KeyError:
            raise NotFound(f"{kind} {namespace}/{name}") from None

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        metadata = body["metadata"]
        key = (body["kind"], metadata["namespace"], metadata["name"])
        self.version += 1
        live = self.objects.get(key)
        metadata["uid"] = live["metadata"]["uid"] if live else f"uid-{self.version}"
        metadata["resourceVersion"] = str(self.version)
        self.objects[key] = body
        return copy.deepcopy(body)


def _merged(live: Any, applied: Any) -> Any:
    if isinstance(live, Mapping) and isinstance(applied, Mapping):
        return {
            **copy.deepcopy(dict(live)),
            **{name: _merged(live.get(name), value) for name, value in applied.items()},
        }
    return copy.deepcopy(applied)
