"""Measuring in rounds: while a model has ready pods they are read every few seconds, and the model is looked at anew.

Apart from reconciling, so that pods which answer slowly or never hold up nobody else. Where nothing happens for long a
look is not worth its cost: what it would decide it has decided, and most models of a large fleet are idle.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider_operator.cache import Key
from outrider_operator.clock import REAL, Clock
from outrider_operator.fleet.history import is_still, remember
from outrider_operator.fleet.samples import Answer, Fleet, Sample
from outrider_operator.fleet.windows import STALE
from outrider_operator.observe import Pod

log = logging.getLogger(__name__)
QUIET = 60.0  # seconds between looks at a model in which nothing happens
ReadPods = Callable[[Sequence[Pod]], Awaitable[Mapping[str, Sample]]]


@dataclass(slots=True)
class _Watched:
    pods: tuple[Pod, ...]
    keep: float  # seconds of history
    settled: bool = False  # the last look changed nothing
    fleet: Fleet = field(default_factory=Fleet)
    task: asyncio.Task[None] | None = None


class Rounds:
    def __init__(
        self,
        read: ReadPods,
        measured: Callable[[Key], None],
        interval: float = 5.0,
        clock: Clock = REAL,
    ) -> None:
        self._read, self._measured, self._interval = read, measured, interval
        self._now, self._sleep = clock.monotonic, clock.sleep
        self._models: dict[Key, _Watched] = {}

    def fleet(self, key: Key) -> Fleet:
        return self._models[key].fleet if key in self._models else Fleet()

    def follow(self, key: Key, pods: Sequence[Pod], keep: float) -> None:
        """From now on read these pods, the ready ones, and remember `keep` seconds of what they say."""
        watched = self._models.get(key)
        if watched is None:
            if not pods:
                return
            watched = self._models[key] = _Watched(tuple(pods), keep)
        watched.pods, watched.keep = tuple(pods), keep
        running = watched.task is not None and not watched.task.done()
        if pods and not running:
            watched.task = asyncio.create_task(self._measure(key, watched), name=f"rounds of {key}")
        elif not pods and watched.fleet.samples:
            watched.fleet = remember(watched.fleet, {}, self._now(), keep)

    def told(self, key: Key, pod: str, answer: Answer) -> None:
        """A pod's answer to a PUT is newer than its last sample."""
        watched = self._models.get(key)
        if watched and (samples := watched.fleet.samples.get(pod)):
            newest = (*samples[:-1], Sample(samples[-1].at, answer))
            watched.fleet = replace(watched.fleet, samples={**watched.fleet.samples, pod: newest})

    def settled(self, key: Key, yes: bool) -> None:
        """Whether a look found all as it should be, so that another at the same would change nothing."""
        if watched := self._models.get(key):
            watched.settled = yes

    def forget(self, key: Key) -> None:
        watched = self._models.pop(key, None)
        if watched and watched.task:
            watched.task.cancel()

    async def close(self) -> None:
        tasks = [watched.task for watched in self._models.values() if watched.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _measure(self, key: Key, watched: _Watched) -> None:
        """Rounds until no pod is ready."""
        changed, looked = self._now(), -math.inf
        while watched.pods:
            started = self._now()
            samples = await self._read(watched.pods)
            ready = {pod.name for pod in watched.pods}  # may have changed meanwhile
            kept = {name: sample for name, sample in samples.items() if name in ready}
            # windows end with the round's start: what is older by then goes, however long reading took
            watched.fleet = remember(watched.fleet, kept, started, watched.keep)
            now = self._now()
            if not is_still(watched.fleet):
                changed = now
            # every window then holds nothing but stillness, and silence has been noticed
            quiet = watched.settled and now - changed > watched.keep + STALE
            if not quiet or now - looked >= QUIET:
                looked = now
                self._measured(key)
            await self._sleep(max(0.0, started + self._interval - self._now()))
