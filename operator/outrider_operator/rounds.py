"""Measuring in rounds: while a model has ready pods they are read every few seconds, and the model is looked at anew.

Apart from reconciling, so that pods which answer slowly or never hold up nobody else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider_operator.cache import Key
from outrider_operator.clock import REAL, Clock
from outrider_operator.fleet.history import remember
from outrider_operator.fleet.samples import Answer, Fleet, Sample
from outrider_operator.observe import Pod

log = logging.getLogger(__name__)
ReadPods = Callable[[Sequence[Pod]], Awaitable[Mapping[str, Sample]]]


@dataclass(slots=True)
class _Watched:
    pods: tuple[Pod, ...]
    keep: float  # seconds of history
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
        while watched.pods:
            started = self._now()
            samples = await self._read(watched.pods)
            ready = {pod.name for pod in watched.pods}  # may have changed meanwhile
            kept = {name: sample for name, sample in samples.items() if name in ready}
            watched.fleet = remember(watched.fleet, kept, self._now(), watched.keep)
            self._measured(key)
            await self._sleep(max(0.0, started + self._interval - self._now()))
