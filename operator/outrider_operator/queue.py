"""The work queue: which SpeculativeModels to look at, and when. Keys, never events.

A key waits at most once, is worked on by one worker at a time, and comes back when it was added meanwhile. The rules
are plain methods on an injected clock; `get` alone waits.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from outrider_operator.cache import Key


class Queue:
    def __init__(
        self,
        first_delay: float = 0.2,
        longest_delay: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,  # in [0, 1)
    ) -> None:
        self._first_delay, self._longest_delay = first_delay, longest_delay
        self._clock, self._jitter = clock, jitter
        self._ready: deque[Key] = deque()
        self._since: dict[Key, float] = {}  # when each ready key became ready
        self._working: dict[Key, float] = {}  # when work on each began
        self._again: set[Key] = set()  # added while being worked on
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []  # holds outdated pairs too; _due says which count
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()

    # -- adding ------------------------------------------------------------------------------------------------------

    def add(self, key: Key) -> None:
        """As soon as a worker is free."""
        self._due.pop(key, None)
        if key in self._working:
            self._again.add(key)
        elif key not in self._since:
            self._since[key] = self._clock()
            self._ready.append(key)
            self._wake.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """In `seconds`, unless something sooner is planned for it."""
        if key in self._since or key in self._again:
            return
        due = self._clock() + max(0.0, seconds)
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heappush(self._heap, (due, key))
            self._wake.set()

    def retry(self, key: Key, retry_after: float | None = None) -> float:
        """After a failure: exponential backoff, half of it jitter; never before the server's Retry-After (seconds)."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay: float = min(self._longest_delay, self._first_delay * 2 ** min(failures, 32))
        delay = max(delay * (0.5 + 0.5 * self._jitter()), retry_after or 0.0)
        self.add_after(key, delay)
        return delay

    # -- taking ------------------------------------------------------------------------------------------------------

    def take(self) -> Key | None:
        """The next key, if one is ready now. `done` must follow."""
        self._ripen()
        if not self._ready:
            return None
        key = self._ready.popleft()
        del self._since[key]
        self._working[key] = self._clock()
        return key

    def done(self, key: Key) -> None:
        del self._working[key]
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def succeeded(self, key: Key) -> None:
        """The next failure starts with the first delay again."""
        self._failures.pop(key, None)

    def forget(self, key: Key) -> None:
        """The object is gone: nothing planned and nothing remembered about it."""
        self._failures.pop(key, None)
        self._due.pop(key, None)

    async def get(self) -> Key:
        while (key := self.take()) is None:
            self._wake.clear()
            due = self._next_due()
            try:
                await asyncio.wait_for(self._wake.wait(), None if due is None else max(0.0, due - self._clock()))
            except TimeoutError:
                continue
        if self._ready:
            self._wake.set()  # for the next worker: one `set` may stand for several keys
        return key

    # -- looking -----------------------------------------------------------------------------------------------------

    def depth(self) -> int:
        return len(self._ready)

    def failures(self, key: Key) -> int:
        return self._failures.get(key, 0)

    def oldest(self) -> float:
        """Seconds that the longest-waiting or longest-worked-on key has taken: a stuck queue shows here."""
        starts = [*list(self._since.values())[:1], *self._working.values()]
        return self._clock() - min(starts) if starts else 0.0

    def _ripen(self) -> None:
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            due, key = heappop(self._heap)
            if self._due.get(key) == due:
                self.add(key)

    def _next_due(self) -> float | None:
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
