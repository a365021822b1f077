"""Windows over samples: exact means from integral counters, on one grid for all pods, with gaps seen as gaps.

Counters are integrals over the pod's own clock, so a difference divided by the time between is the mean, whatever the
operator's clock or delays did meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

from outrider_operator.fleet.samples import Counters, Fleet, Sample

PERIOD = 5.0  # seconds between rounds of reading
STALE = 3 * PERIOD  # a pod last heard of longer ago is not measured
LONGEST = STALE  # seconds one interval may span and still stand for each period in it
THINNED = 90.0  # the same for the past of the load, whose old samples are thinned to one a minute

Samples = Mapping[str, tuple[Sample, ...]]


@dataclass(frozen=True, slots=True)
class Interval:
    """What one pod did between two readings. Times are the operator's, means and counts the pod's own."""

    start: float
    end: float
    running: float  # mean requests
    waiting: float  # mean requests
    tokens: float  # draft length in force at its end
    drafts: float
    draft_tokens: float
    accepted_tokens: float
    generated_tokens: float
    rejected_requests: float

    @property
    def in_flight(self) -> float:
        return self.running + self.waiting


def intervals(samples: Sequence[Sample], longest: float = LONGEST) -> list[Interval]:
    """The measured intervals, oldest first. One that holds a failed reading, or is too long, is a gap: left out."""
    pairs = pairwise(samples)
    return [found for before, after in pairs if (found := _interval(before, after, longest)) is not None]


def _interval(before: Sample, after: Sample, longest: float) -> Interval | None:
    if before.answer is None or after.answer is None or not 0 < after.at - before.at <= longest:
        return None
    now, then = astuple(after.answer.counters), astuple(before.answer.counters)
    differences = [a - b for a, b in zip(now, then, strict=True)]
    # any counter that fell means the process started anew: all it counted, it counted since
    d = Counters(*(now if min(differences) < 0 else differences))
    if d.uptime_seconds <= 0:
        return None
    return Interval(
        start=before.at,
        end=after.at,
        running=d.running_request_seconds / d.uptime_seconds,
        waiting=d.waiting_request_seconds / d.uptime_seconds,
        tokens=after.answer.tokens,
        drafts=d.drafts,
        draft_tokens=d.draft_tokens,
        accepted_tokens=d.accepted_tokens,
        generated_tokens=d.generated_tokens,
        rejected_requests=d.rejected_requests,
    )


@dataclass(frozen=True, slots=True)
class Round:
    """One period of the grid: the pods measured in it, and how many more there were."""

    measured: tuple[Interval, ...]
    unmeasured: int

    @property
    def gap(self) -> bool:
        """Too little is known to judge by: fewer than half of the pods, or none."""
        return not self.measured or len(self.measured) < self.unmeasured

    def mean(self, value: Callable[[Interval], float]) -> float:
        return sum(map(value, self.measured)) / len(self.measured)

    def total(self, value: Callable[[Interval], float], unmeasured: float) -> float:
        """The sum over pods, each unmeasured one counted as `unmeasured`."""
        return sum(map(value, self.measured)) + unmeasured * self.unmeasured


def periods(window: float) -> int:
    """How many periods of the grid a window of so many seconds has; the shortest has one."""
    return max(1, math.ceil(window / PERIOD))


def rounds(samples: Samples, end: float, count: int, longest: float = LONGEST) -> list[Round]:
    """The last `count` periods before `end`, newest first. A pod is in those between its first and last sample."""
    middles = [end - PERIOD * (number + 0.5) for number in range(count)]
    measured: list[list[Interval]] = [[] for _ in middles]
    unmeasured = [0] * count
    for those in samples.values():
        if not those:
            continue
        backwards = iter(reversed(intervals(those, longest)))
        current = next(backwards, None)
        for number, middle in enumerate(middles):
            if not those[0].at < middle <= those[-1].at:
                continue
            while current is not None and current.start >= middle:
                current = next(backwards, None)
            if current is not None and middle <= current.end:
                measured[number].append(current)
            else:
                unmeasured[number] += 1
    return [Round(tuple(those), missing) for those, missing in zip(measured, unmeasured, strict=True)]


@dataclass(frozen=True, slots=True)
class View:
    """The samples that count for a decision now: of the pods that are ready, and of those that were."""

    ready: Samples  # every ready pod, with no samples where none was read yet
    gone: Samples
    now: float

    @classmethod
    def of(cls, fleet: Fleet, ready: Sequence[str], now: float) -> View:
        known = {**fleet.gone, **fleet.samples}
        return cls({name: known.pop(name, ()) for name in ready}, known, now)

    @property
    def fresh(self) -> dict[str, Sample]:
        """The last reading of each pod that can be measured now."""
        newest = {name: those[-1] for name, those in self.ready.items() if those}
        answered = {
            name: next((s for s in reversed(self.ready[name]) if s.answer is not None), sample)
            for name, sample in newest.items()
        }
        return {name: s for name, s in answered.items() if s.answer is not None and self.now - s.at <= STALE}

    @property
    def measurable(self) -> bool:
        """Whether at least half of the ready pods can be measured, and there is one."""
        return bool(self.ready) and 2 * len(self.fresh) >= len(self.ready)

    @property
    def end(self) -> float:
        """When the newest round was read."""
        return max((those[-1].at for those in self.ready.values() if those), default=self.now)

    @property
    def start(self) -> float:
        """When the oldest sample was taken: a decision needs a window that starts no earlier."""
        everything = (*self.ready.values(), *self.gone.values())
        return min((those[0].at for those in everything if those), default=math.inf)

    def window(self, seconds: float) -> list[Round] | None:
        """The rounds of the ready pods, newest first; None until samples reach so far back."""
        return rounds(self.ready, self.end, periods(seconds)) if self._reaches(seconds) else None

    def past(self, seconds: float) -> list[Round] | None:
        """The same with the pods that were there then and are gone."""
        everything = {**self.gone, **self.ready}
        return rounds(everything, self.end, periods(seconds), THINNED) if self._reaches(seconds) else None

    def _reaches(self, seconds: float) -> bool:
        # half a period of slack: rounds are read every five seconds, not at every fifth second
        return self.start <= self.end - PERIOD * periods(seconds) + PERIOD / 2
