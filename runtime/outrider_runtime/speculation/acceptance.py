"""How likely a draft is to stand, by position and by request, learned from verification.

`accepted` of `drafted` tells that the first `accepted` positions stood and, where it is less, that the next did not;
nothing is known of those behind. So what is estimated is conditional: that draft j stands given that j - 1 did. The
pool has one estimate per position; a request moves all of them by one shift of their log odds, as far as requests are
seen to differ (empirical Bayes): among equals, noise is not taken for character.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INITIAL = 0.9  # before anything is known: draft, and learn
POOL_SECONDS = 1.0  # memory of the pool while drafting: slow changes; sudden ones are seen at once
POOL_TRIALS = 64.0  # which holds at least so many trials of a position
PROBED_TRIALS = 128.0  # and at most so many once only probes look: after a second or two they outvote it
LEAST_TRIALS = 8.0
REQUEST_SECONDS = 1.0  # memory of a request: one that drafts nothing is looked at again after about that
CHANGED = 3.5  # standard deviations of the last few steps from what was expected: start anew
CHANGED_TRIALS = 2.0  # with what was known counting as much as so many trials
RECENT = 0.8  # weight of a step in the next one's sight
UNSEEN_SECONDS = 10.0  # memory of positions that no draft reaches
UNSEEN_AFTER = 0.25  # seconds: then they are hoped to be better than they looked
LEAST, MOST = 0.005, 0.995  # chance
SMOOTHING = 8.0  # trials for which a position takes after the one before it
WIDEST = 4.0  # shift of the log odds


class _Pooled(NamedTuple):
    chances: Floats  # [length]
    hoped: Floats  # [length]
    sums: Floats  # [2, length + 1] of the first positions' chances and variances


class Acceptance:
    """Slots are small integers, one for each running request; `length` is the longest draft."""

    def __init__(self, slots: int, length: int) -> None:
        self.trials = 0  # of the first position, ever
        # By position. Plain lists: there are a few, and arrays of so few cost more.
        self._mean = [INITIAL] * length
        self._mass = [1.0] * length
        self._unseen = [0.0] * length  # seconds since a draft got there
        # Of each slot, forgetting: positions that stood, that were expected to, their count, and variance (with the
        # weights once and squared).
        self._slots = np.zeros((5, slots))
        self._surplus = self._variance = 0.0  # of the last few steps
        self._spread = 0.0  # variance of the requests' log odds
        self._last = -math.inf
        self._pooled: _Pooled | None = None  # until more is known

    def pooled(self) -> Floats:
        """That draft j stands given that j - 1 did, [length]."""
        return self._smoothed().chances

    def hoped(self) -> Floats:
        """The same, higher by a standard deviation where no draft got lately: what might be good is tried, and known,
        [length]."""
        return self._smoothed().hoped

    def _smoothed(self) -> _Pooled:
        if self._pooled is None:
            chances, hoped = [], []
            before = self._mean[0]
            for mean, mass, unseen in zip(self._mean, self._mass, self._unseen, strict=True):
                before = (mass * mean + SMOOTHING * before) / (mass + SMOOTHING)
                deviation = math.sqrt(before * (1.0 - before) / (mass + SMOOTHING))
                chances.append(min(max(before, LEAST), MOST))
                hoped.append(min(chances[-1] + (deviation if unseen > UNSEEN_AFTER else 0.0), MOST))
            found = np.array(chances)
            sums = np.zeros((2, len(chances) + 1))
            np.cumsum((found, found * (1.0 - found)), axis=1, out=sums[:, 1:])
            self._pooled = _Pooled(found, np.array(hoped), sums)
        return self._pooled

    def shifts(self, slots: Ints) -> Floats:
        """By how much each request's log odds differ from the pool's."""
        if self._spread <= 0.0:
            return np.zeros(len(slots))
        stood, expected, count, _, _ = self._slots[:, slots]
        usual = np.divide(expected, count, out=np.full(len(slots), 0.5), where=count > 0)
        usual = np.clip(usual, 0.01, 0.99)
        doubt = 1.0 / (self._spread * usual * (1.0 - usual))  # trials' worth of trust in the pool
        for_it, against = stood + doubt * usual, count - stood + doubt * (1.0 - usual)
        return np.asarray(np.clip(np.log(for_it / against * (1.0 - usual) / usual), -WIDEST, WIDEST))

    def observe(self, slots: Ints, drafted: Ints, accepted: Ints, now: float, *, probe: bool) -> None:
        """A step's verifications; `now` is monotonic. Slots that drafted nothing may be there."""
        if not drafted.all():
            some = drafted > 0
            slots, drafted, accepted = slots[some], drafted[some], accepted[some]
        if not len(slots):
            return
        elapsed = min(max(now - self._last, 0.0), 60.0)
        self._last = now
        reached = np.minimum(accepted + 1, drafted)
        trials, successes = _at_least(reached, len(self._mean)), _at_least(accepted, len(self._mean))
        self.trials += trials[0]
        self._watch(trials, successes, probe=probe)
        fading, unseen_fading = math.exp(-elapsed / POOL_SECONDS), math.exp(-elapsed / UNSEEN_SECONDS)
        for index, (tried, stood, mass) in enumerate(zip(trials, successes, self._mass, strict=True)):
            if tried:
                kept = max(mass * fading, min(mass, LEAST_TRIALS if probe else POOL_TRIALS))
                kept = min(kept, PROBED_TRIALS) if probe else kept
                self._mean[index] = (kept * self._mean[index] + stood) / (kept + tried)
                self._mass[index] = kept + tried
                self._unseen[index] = 0.0
            else:
                self._mass[index] = mass * unseen_fading
                self._unseen[index] += elapsed
        self._pooled = None
        self._observe_slots(slots, reached, accepted, elapsed)

    def forget(self, slot: int) -> None:
        """Its request has ended."""
        self._slots[:, slot] = 0.0

    def _watch(self, trials: Sequence[int], successes: Sequence[int], *, probe: bool) -> None:
        """Where the last steps cannot be luck, what was learned before them hardly counts any more. Probes are rare:
        one is enough, if it says so clearly."""
        surplus = variance = 0.0
        for chance, tried, stood in zip(self.pooled().tolist(), trials, successes, strict=True):
            chance = min(max(chance, 0.05), 0.95)
            surplus += stood - tried * chance
            variance += tried * chance * (1.0 - chance)
        self._surplus = RECENT * self._surplus + surplus
        self._variance = RECENT**2 * self._variance + variance
        changed = abs(self._surplus) > CHANGED * math.sqrt(self._variance)
        if changed or (probe and abs(surplus) > CHANGED * math.sqrt(variance)):
            self._mass = [min(mass, CHANGED_TRIALS) for mass in self._mass]
            self._pooled = None
            self._surplus = self._variance = 0.0

    def _observe_slots(self, slots: Ints, reached: Ints, accepted: Ints, elapsed: float) -> None:
        expected, variance = self._smoothed().sums[:, reached]
        kept = math.exp(-elapsed / REQUEST_SECONDS)
        self._slots *= kept
        self._slots[4] *= kept
        own = self._slots[:, slots]
        own += (accepted, expected, reached, variance, variance)
        self._slots[:, slots] = own
        stood, usual, _, weight, noise = own
        surplus = stood - usual
        surplus -= weight * (surplus.sum() / weight.sum())  # a change of all is the pool's to learn
        # What chance alone gives, and as much again as it could by luck, is no difference.
        luck = 1.0 + 3.0 * math.sqrt(2.0 / len(slots))
        spread = float(surplus @ surplus - luck * noise.sum()) / max(float(weight @ weight), 1e-9)
        self._spread += (1.0 - kept) * (min(max(spread, 0.0), 9.0) - self._spread)


def _at_least(counts: Ints, length: int) -> list[int]:
    """How many of them reach 1, 2, … length."""
    by_count = np.bincount(counts, minlength=length + 1).tolist()
    return list(accumulate(by_count[length:0:-1]))[::-1]
