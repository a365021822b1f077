"""kopf, in this file alone: frames of the watches go into the cache, keys into the queue. No work is done here.

Only `on.event` is used, which writes nothing: no annotations, no finalizers, no peering. kopf's own change detection,
timers and indices are left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import kopf

from outrider_operator.cache import Cache
from outrider_operator.kinds import MODEL, Kind
from outrider_operator.kube import Credentials
from outrider_operator.listing import Lister
from outrider_operator.queue import Queue
from outrider_operator.writes import Writes


class Frames:
    """Takes in what the watches say."""

    def __init__(self, cache: Cache, queue: Queue, lister: Lister, writes: Writes) -> None:
        self._cache, self._queue, self._lister, self._writes = cache, queue, lister, writes

    def take(self, kind: str, change: str | None, body: Mapping[str, Any]) -> None:
        """`change` is ADDED, MODIFIED or DELETED, or None for an object of the first list."""
        if change is not None:
            self._lister.heard(kind)
        models = self._cache.remove(body) if change == "DELETED" else self._cache.put(body)
        models = frozenset(key for key in models if kind == MODEL or self._cache.get(MODEL, key))
        if models and not self._writes.is_awaited(body, models):
            for key in models:
                self._queue.add(key)


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf would copy every object of every frame to tell what changed in it; nobody here asks."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        return None


class Watches:
    """kopf, running."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        frames: Frames,
        credentials: Callable[[], Awaitable[Credentials]],
        namespaces: Sequence[str],
        watching: Callable[[], None],
    ) -> None:
        """`watching` is called when the watches have begun; without namespaces they are of all of them."""
        self._registry, self._settings = _registry(kinds, frames, credentials), _settings(kinds)
        self._namespaces, self._watching = namespaces, watching
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Until `stop`. Raises when a watch fails for good."""
        # two lines for every frame otherwise, and one for each way to end
        logging.getLogger("kopf").setLevel(logging.WARNING)
        ready = asyncio.Event()
        announcing = asyncio.create_task(self._announce(ready))
        try:
            await kopf.operator(
                registry=self._registry,
                settings=self._settings,
                clusterwide=not self._namespaces,
                namespaces=list(self._namespaces),
                standalone=True,
                stop_flag=self._stopping,
                ready_flag=ready,
            )
        finally:
            announcing.cancel()

    def stop(self) -> None:
        self._stopping.set()

    async def _announce(self, ready: asyncio.Event) -> None:
        await ready.wait()
        self._watching()


def _registry(
    kinds: Sequence[Kind], frames: Frames, credentials: Callable[[], Awaitable[Credentials]]
) -> kopf.OperatorRegistry:
    result = kopf.OperatorRegistry()

    @kopf.on.login(registry=result)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        known = await credentials()
        scheme, _space, token = known.authorization.partition(" ")
        return kopf.ConnectionInfo(
            server=known.server,
            ca_path=known.ca_file,
            insecure=known.insecure,
            scheme=scheme or None,
            token=token or None,
            certificate_path=known.certificate_file,
            private_key_path=known.key_file,
        )

    for kind in kinds:

        async def take(event: kopf.RawEvent, kind: str = kind.name, **_: Any) -> None:
            frames.take(kind, event["type"], event["object"])

        kopf.on.event(kind.group, kind.version, kind.plural, id=f"take-{kind.plural}", registry=result)(take)
    return result


def _settings(kinds: Sequence[Kind]) -> kopf.OperatorSettings:
    result = kopf.OperatorSettings()
    result.posting.enabled = False
    result.peering.standalone = True
    result.scanning.disabled = True  # the set of kinds is fixed: neither CRDs nor namespaces are watched
    result.queueing.idle_timeout = 0.5  # a task an object ends soon: thousands are idle
    result.watching.chunk_size = 250
    result.persistence.diffbase_storage = _NoDiffs()
    result.process.ultimate_exiting_timeout = 60
    for kind in kinds:
        if kind.selector:
            result.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    return result
