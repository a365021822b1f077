"""Lists of everything: at the start, before anything is decided, and every ten minutes, to repair drift and whatever
the watches missed. A watch tells nothing about objects deleted while it was down."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

from outrider_operator.cache import Cache, Entry, pack
from outrider_operator.errors import NotFound, OutriderError
from outrider_operator.kinds import MODEL, Kind
from outrider_operator.kube import Kube
from outrider_operator.queue import Queue

log = logging.getLogger(__name__)
_SPREAD = 0.05  # of the interval, over which a list's reconciles are spread


class Lister:
    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        queue: Queue,
        kinds: Sequence[Kind],
        namespaces: Sequence[str],
        interval: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._cache, self._queue, self._clock = kube, cache, queue, clock
        self._kinds = kinds
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._interval = interval
        self._listed_at = clock()
        self._heard: set[str] = set()  # kinds whose watch has said something since the last list
        self._silent: dict[str, int] = {}  # by kind, lists in a row that knew more than a watch that said nothing

    def heard(self, kind: str) -> None:
        """A frame has come from this kind's watch."""
        self._heard.add(kind)

    async def once(self) -> None:
        """List every kind, and look at every object that turns out to have changed. Raises OutriderError."""
        for kind in self._kinds:
            missed = await self._list(kind)
            silent = missed and kind.name not in self._heard
            self._silent[kind.name] = self._silent.get(kind.name, 0) + 1 if silent else 0
        self._heard.clear()
        self._listed_at = self._clock()

    async def first(self) -> None:
        """List each kind until it has worked once: the CRD may be missing and the API server away."""
        for kind in self._kinds:
            delay = 0.2
            while True:
                try:
                    await self._list(kind)
                    break
                except OutriderError as error:
                    hint = "; is the CRD installed?" if isinstance(error, NotFound) else ""
                    log.warning("cannot list yet: %s%s", error, hint)
                    await asyncio.sleep(delay)
                    delay = min(delay * 2, 10.0)
        self._listed_at = self._clock()
        for key in self._cache.models():
            self._queue.add(key)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval * random.uniform(0.9, 1.1))
            try:
                await self.once()
            except OutriderError as error:
                log.warning("listing failed, the watches go on: %s", error)
                continue
            for key in self._cache.models():
                self._queue.add_after(key, self._interval * _SPREAD * random.random())

    def trouble(self) -> str:
        """In words, what says that lists or watches stand still; empty while they move."""
        age = self._clock() - self._listed_at
        if age > 3 * self._interval:
            return f"nothing could be listed for {age:.0f} s"
        silent = [kind for kind, times in self._silent.items() if times >= 2]
        return (
            f"the watches of {', '.join(silent)} said nothing of changes that two lists in a row showed"
            if silent
            else ""
        )

    async def _list(self, kind: Kind) -> int:
        """Returns how many changes it showed that the cache did not know."""
        missed = 0
        for namespace in self._namespaces:
            entries: list[Entry] = []
            version = 0
            async for page in self._kube.pages(kind.name, namespace):
                version = version or page.version
                entries += map(pack, page.items)
            changes = self._cache.replace(kind.name, namespace, entries, version)
            for key in changes.models:
                if kind.name == MODEL or self._cache.get(MODEL, key):
                    self._queue.add(key)
            missed += changes.missed
        return missed
