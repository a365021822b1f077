"""Which requests draft how many tokens, if the draft loop has so many turns: the most tokens a second.

Padding makes cost a staircase, so what is worth a comparison are the right edges of its steps, and what a step's room
is filled with are the drafts likeliest to stand, whoever's they are. Requests are counted by level of acceptance, so
that all this is done on a few dozen numbers however many run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.speculation.cost import Grid, lowered

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

HOPE = 1.0  # standard deviations by which a step may be faster: what might be best and has not run is tried, and known
LEVELS_PER_UNIT = 1.0  # of the requests' log odds


@dataclass(frozen=True, slots=True)
class Captured:
    """Padded sizes, ascending, and which of them are captured, so that they may be chosen."""

    tokens: Ints
    requests: Ints
    lengths: Ints
    tokens_ready: Mask  # [tokens]
    loops_ready: Mask  # [lengths, requests]

    @classmethod
    def all(cls, tokens: Ints, requests: Ints, lengths: Ints) -> Self:
        ready = np.ones(len(tokens), dtype=np.bool_), np.ones((len(lengths), len(requests)), dtype=np.bool_)
        return cls(tokens, requests, lengths, *ready)


@dataclass(frozen=True, slots=True)
class Offer:
    """The best use of a draft loop of `length` turns, or plain decoding."""

    length: int
    rate: float  # tokens a second
    seconds: float  # hoped for, apart from what prompts take
    drafts: int = 0  # over all requests
    requests: int = 0  # that draft


@dataclass(frozen=True, slots=True)
class Reading:
    """What the prompts of a step change. They take their time in this step or in another, whatever is drafted: so
    drafts are weighed by the rest, or they would seem to be worth a share of what prompts cost."""

    tokens: int = 0
    seconds: float = 0.0  # that they add to a plain step
    brought: float = 0.0  # tokens that requests still to be read would decode in the time of a plain step
    displaced: float = 0.0  # tokens that each draft costs where the step is full: what it displaces is read later


NOTHING_READ = Reading()


class _Cell(NamedTuple):
    """The drafts at one position of one level's requests."""

    level: int
    position: int
    able: int  # requests that may draft so far
    width: int  # drafts of each there: more than one in a tree, none where a tree grows no further
    survival: float  # of one of them


class _Edge(NamedTuple):
    room: int  # drafts that fit
    bucket: int  # of tokens, by index


class _Use(NamedTuple):
    drafts: int
    expected: float  # of them to stand
    requests: int
    bucket: int


class Allocation:
    """One step's requests, [n] each: shift of the log odds from the pool's, and most turns they may draft."""

    def __init__(self, chances: Floats, shifts: Floats, caps: Ints, widths: Ints | None = None) -> None:
        """`chances` are the pool's conditional acceptance by position, up to the longest draft thought of; `widths` are
        how many drafts there are at each, one by default."""
        depth = len(chances)
        widths = np.ones(depth, dtype=np.int64) if widths is None else widths
        self._count = len(caps)
        self._caps = np.minimum(caps, depth)
        if shifts.any():
            values, self._level = np.unique(np.rint(shifts * LEVELS_PER_UNIT).astype(np.int64), return_inverse=True)
        else:
            values, self._level = np.zeros(1, dtype=np.int64), np.zeros(self._count, dtype=np.int64)
        odds = chances / (1.0 - chances) * np.exp(values / LEVELS_PER_UNIT)[:, None]
        survival = np.cumprod(odds / (1.0 + odds), axis=1)  # [levels, depth]
        by_cap = np.bincount(self._level * (depth + 1) + self._caps, minlength=len(values) * (depth + 1))
        able = by_cap.reshape(len(values), depth + 1)[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
        # The likeliest draft first: a level's positions stay in order.
        order = np.argsort(-survival, axis=None, kind="stable")
        position = order % depth
        columns = [order // depth, position + 1, able.ravel()[order], widths[position], survival.ravel()[order]]
        self._cells = [_Cell(*cell) for cell in zip(*(column.tolist() for column in columns), strict=True) if cell[2]]

    def offers(self, grid: Grid, captured: Captured, longest: int, reading: Reading = NOTHING_READ) -> list[Offer]:
        """Plain decoding, and of each captured draft length up to `longest` the best, where there is one."""
        own = self._count + reading.tokens
        buckets, target = captured.tokens.tolist(), (grid.target + grid.attention).tolist()
        first = min(bisect_left(buckets, own), len(buckets) - 1)
        plain = _hoped(target[first], float(grid.target_deviation[first]), reading)
        worth = self._count + reading.brought
        offers = [Offer(0, worth / plain, plain)]
        ready = captured.tokens_ready.tolist()
        edges = [
            _Edge(buckets[index] - own, index)
            for index in range(first, len(buckets))
            if ready[index] and buckets[index] > own
        ]
        requests, loops, ready = captured.requests.tolist(), grid.draft.tolist(), captured.loops_ready.tolist()
        for row, length in enumerate(captured.lengths.tolist()):
            if length > longest:
                break
            best = offers[0]
            for use in _uses([cell for cell in self._cells if cell.position <= length], edges):
                bucket = min(bisect_left(requests, use.requests), len(requests) - 1)
                seconds = target[use.bucket] + loops[row][bucket]
                seconds = _hoped(seconds, float(grid.deviation[use.bucket, row, bucket]), reading)
                rate = (worth + use.expected - use.drafts * reading.displaced) / seconds
                if ready[row][bucket] and (best.length == 0 or rate > best.rate):
                    best = Offer(length, rate, seconds, use.drafts, use.requests)
            if best.length:
                offers.append(best)
        return offers

    def lengths(self, offer: Offer) -> Ints:
        """What each request drafts under an offer, [n]."""
        given = np.zeros(self._count, dtype=np.int64)
        left = offer.drafts
        whole = np.zeros(int(self._level.max(initial=0)) + 1, dtype=np.int64)
        for cell in self._cells:
            if cell.position > offer.length:
                continue
            if cell.able * cell.width > left:
                some = np.flatnonzero((self._level == cell.level) & (self._caps >= cell.position))
                given[some[: left // cell.width]] = 1
                break
            whole[cell.level] = cell.position
            left -= cell.able * cell.width
        return np.minimum(whole[self._level], self._caps) + given


def uniform(caps: Ints, length: int) -> Ints:
    """The same for everyone who may, [n]."""
    return np.minimum(caps, length)


def longest_captured(captured: Captured, requests: int, longest: int) -> int:
    """The longest draft loop for so many requests, of those captured; 0 if none."""
    bucket = min(int(np.searchsorted(captured.requests, requests)), len(captured.requests) - 1)
    ready: Sequence[int] = captured.lengths[captured.loops_ready[:, bucket] & (captured.lengths <= longest)].tolist()
    return max(ready, default=0)


def _hoped(seconds: float, deviation: float, reading: Reading) -> float:
    """Without the prompts' part, by as much as it may be less."""
    own = lowered(seconds, reading.seconds)
    return lowered(own, HOPE * deviation * own / seconds)


def _uses(cells: Iterable[_Cell], edges: Sequence[_Edge]) -> Iterator[_Use]:
    """The likeliest drafts up to each edge, and all of them."""
    drafts, expected, requests, reached = 0, 0.0, 0, 0
    for cell in cells:
        while reached < len(edges) and edges[reached].room < drafts + cell.able * cell.width:
            edge = edges[reached]
            part = (edge.room - drafts) // cell.width
            first = part if cell.position == 1 else 0
            if used := drafts + part * cell.width:
                yield _Use(used, expected + part * cell.survival, requests + first, edge.bucket)
            reached += 1
        if reached == len(edges):
            return
        drafts += cell.able * cell.width
        expected += cell.able * cell.survival
        requests += cell.able if cell.position == 1 else 0
    if drafts:
        yield _Use(drafts, expected, requests, edges[reached].bucket)
