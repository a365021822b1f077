"""Windows over samples: exact means from integral counters, on one grid for all pods, with gaps seen as gaps.

Counters are integrals over the pod's own clock, so a difference divided by the time between is the mean, whatever the
operator's clock or delays did meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from outrider_operator.fleet.samples import Answer, Counters, Fleet, Sample

PERIOD = 5.0  # seconds between rounds of reading
STALE = 3 * PERIOD  # a pod last heard of longer ago is not measured
LONGEST = STALE  # seconds one interval may span and still stand for each period in it
SHORTEST = 1e-6  # seconds of a pod's clock, below which nothing was measured
THINNED = 90.0  # the same for the past of the load, whose old samples are thinned to one a minute

_NOTHING = Counters(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Interval:
    """What one pod did between two readings. Times are the operator's, means and counts the pod's own."""

    start: float
    end: float
    running: float  # mean requests
    waiting: float  # mean requests
    drafts: float
    draft_tokens: float
    accepted_tokens: float
    generated_tokens: float
    rejected_requests: float

    @property
    def in_flight(self) -> float:
        return self.running + self.waiting


def intervals(samples: Sequence[Sample]) -> list[Interval]:
    """The measured intervals, oldest first. One that holds a failed reading, or is too long, is a gap: left out."""
    return [found for before, after in pairwise(samples) if (found := _interval(before, after)) is not None]


def _interval(before: Sample, after: Sample) -> Interval | None:
    if before.answer is None or after.answer is None or not 0 < after.at - before.at <= THINNED:
        return None
    now, then = after.answer.counters, before.answer.counters
    if restarted(now, then):
        then = _NOTHING  # all it counted, it counted since
    seconds = now.uptime_seconds - then.uptime_seconds
    if seconds < SHORTEST:
        return None
    return Interval(
        start=before.at,
        end=after.at,
        running=(now.running_request_seconds - then.running_request_seconds) / seconds,
        waiting=(now.waiting_request_seconds - then.waiting_request_seconds) / seconds,
        drafts=now.drafts - then.drafts,
        draft_tokens=now.draft_tokens - then.draft_tokens,
        accepted_tokens=now.accepted_tokens - then.accepted_tokens,
        generated_tokens=now.generated_tokens - then.generated_tokens,
        rejected_requests=now.rejected_requests - then.rejected_requests,
    )


def restarted(now: Counters, then: Counters) -> bool:
    """Whether any counter fell. Uptime alone does not tell: a process may have run longer than the one before it."""
    return (
        now.uptime_seconds < then.uptime_seconds
        or now.running_request_seconds < then.running_request_seconds
        or now.waiting_request_seconds < then.waiting_request_seconds
        or now.drafts < then.drafts
        or now.draft_tokens < then.draft_tokens
        or now.accepted_tokens < then.accepted_tokens
        or now.generated_tokens < then.generated_tokens
        or now.rejected_requests < then.rejected_requests
    )


@dataclass(frozen=True, slots=True)
class Track:
    """What one pod did, and from when to when it was there to be asked."""

    since: float
    until: float
    intervals: tuple[Interval, ...]  # oldest first

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Track:
        if not samples:
            return cls(math.inf, -math.inf, ())
        return cls(samples[0].at, samples[-1].at, tuple(intervals(samples)))


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


def rounds(tracks: Iterable[Track], end: float, count: int, longest: float = LONGEST) -> list[Round]:
    """The last `count` periods before `end`, newest first. A pod is in those between its first and last sample;
    an interval of more than `longest` seconds measures none of them."""
    middles = [end - PERIOD * (number + 0.5) for number in range(count)]
    measured: list[list[Interval]] = [[] for _ in middles]
    unmeasured = [0] * count
    for track in tracks:
        backwards = reversed(track.intervals)
        current = next(backwards, None)
        for number, middle in enumerate(middles):
            if not track.since < middle <= track.until:
                continue
            while current is not None and current.start >= middle:
                current = next(backwards, None)
            if current is not None and middle <= current.end and current.end - current.start <= longest:
                measured[number].append(current)
            else:
                unmeasured[number] += 1
    return [Round(tuple(those), missing) for those, missing in zip(measured, unmeasured, strict=True)]


@dataclass(frozen=True)
class View:
    """The samples that count for a decision now: of the pods that are ready, and of those that were."""

    ready: Mapping[str, tuple[Sample, ...]]  # every ready pod, with no samples where none was read yet
    gone: Mapping[str, tuple[Sample, ...]]
    now: float

    @classmethod
    def of(cls, fleet: Fleet, ready: Sequence[str], now: float) -> View:
        """A pod that is ready again and was not read since has said nothing yet: what it said before is past."""
        known = dict(fleet.samples)
        return cls({name: known.pop(name, ()) for name in ready}, {**fleet.gone, **known}, now)

    def of_pods(self, names: frozenset[str]) -> View:
        """The view of some of the ready pods alone."""
        return View({name: those for name, those in self.ready.items() if name in names}, {}, self.now)

    @cached_property
    def tracks(self) -> dict[str, Track]:
        """Of the ready pods."""
        return {name: Track.of(samples) for name, samples in self.ready.items()}

    @cached_property
    def fresh(self) -> dict[str, Answer]:
        """The last answer of each pod that can be measured now."""
        found = {}
        for name, samples in self.ready.items():
            for sample in reversed(samples):
                if self.now - sample.at > STALE:
                    break
                if sample.answer is not None:
                    found[name] = sample.answer
                    break
        return found

    @property
    def measurable(self) -> bool:
        """Whether at least half of the ready pods can be measured, and there is one."""
        return bool(self.ready) and 2 * len(self.fresh) >= len(self.ready)

    @cached_property
    def end(self) -> float:
        """When the newest round was read."""
        return max((samples[-1].at for samples in self.ready.values() if samples), default=self.now)

    @cached_property
    def start(self) -> float:
        """When the oldest sample was taken: a decision needs a window that starts no earlier."""
        everything = (*self.ready.values(), *self.gone.values())
        return min((samples[0].at for samples in everything if samples), default=math.inf)

    def window(self, seconds: float) -> list[Round] | None:
        """The rounds of the ready pods, newest first; None until samples reach so far back."""
        if not self._reaches(seconds):
            return None
        return rounds(self.tracks.values(), self.end, periods(seconds))

    def past(self, seconds: float) -> list[Round] | None:
        """The same with the pods that were there then and are gone."""
        if not self._reaches(seconds):
            return None
        return rounds((*self.tracks.values(), *self._left), self.end, periods(seconds), THINNED)

    @cached_property
    def _left(self) -> tuple[Track, ...]:
        return tuple(map(Track.of, self.gone.values()))

    def _reaches(self, seconds: float) -> bool:
        # half a period of slack: rounds are read every five seconds, not at every fifth second
        return self.start <= self.end - PERIOD * periods(seconds) + PERIOD / 2
