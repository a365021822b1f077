"""How likely a draft is to stand, by position and by request, learned from verification.

`accepted` of `drafted` tells that the first `accepted` positions stood and, where it is less, that the next did not;
nothing is known of those behind. So what is estimated is conditional: that draft j stands given that j - 1 did. The
pool has one estimate per position; a request moves all of them by one shift of their log odds, as far as requests are
seen to differ (empirical Bayes): among equals, noise is not taken for character.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INITIAL = 0.9  # before anything is known: draft, and learn
POOL_SECONDS = 1.0  # memory of the pool while drafting: slow changes; sudden ones are seen at once
POOL_TRIALS = 64.0  # which holds at least so many trials of a position
PROBED_TRIALS = 24.0  # and at most so many once only probes look: they must be able to outvote it
LEAST_TRIALS = 8.0
REQUEST_SECONDS = 1.0  # memory of a request: one that drafts nothing is looked at again after about that
CHANGED = 3.5  # standard deviations of the last few steps from what was expected: start anew
CHANGED_TRIALS = 2.0  # with what was known counting as much as so many trials
RECENT = 0.8  # weight of a step in the next one's sight
UNSEEN_SECONDS = 10.0  # memory of positions that no draft reaches
SMOOTHING = 8.0  # trials for which a position takes after the one before it
WIDEST = 4.0  # shift of the log odds


class Acceptance:
    """Slots are small integers, one for each running request; `length` is the longest draft."""

    def __init__(self, slots: int, length: int) -> None:
        self.trials = 0  # of the first position, ever
        self._mean = np.full(length, INITIAL)
        self._mass = np.ones(length)
        # Of each slot, forgetting: positions that stood, that were expected to, their count, and variance (with the
        # weights once and squared).
        self._slots = np.zeros((5, slots))
        self._surplus = self._variance = 0.0  # of the last few steps
        self._spread = 0.0  # variance of the requests' log odds
        self._last = -math.inf

    def pooled(self) -> Floats:
        """That draft j stands given that j - 1 did, [length]."""
        chances = np.empty(len(self._mean))
        before = float(self._mean[0])
        for index, (mean, mass) in enumerate(zip(self._mean.tolist(), self._mass.tolist(), strict=True)):
            before = (mass * mean + SMOOTHING * before) / (mass + SMOOTHING)
            chances[index] = before
        return np.asarray(np.clip(chances, 0.005, 0.995))

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
        some = drafted > 0
        if not some.any():
            return
        slots, drafted, accepted = slots[some], drafted[some], accepted[some]
        elapsed = min(max(now - self._last, 0.0), 60.0)
        self._last = now
        reached = np.minimum(accepted + 1, drafted)
        length = len(self._mean)
        trials, successes = _at_least(reached, length), _at_least(accepted, length)
        self.trials += int(trials[0])
        self._watch(trials, successes)
        kept = self._mass * math.exp(-elapsed / POOL_SECONDS)
        kept = np.maximum(kept, np.minimum(self._mass, LEAST_TRIALS if probe else POOL_TRIALS))
        kept = np.minimum(kept, PROBED_TRIALS) if probe else kept
        kept = np.where(trials > 0, kept, self._mass * math.exp(-elapsed / UNSEEN_SECONDS))
        self._mean = (kept * self._mean + successes) / np.maximum(kept + trials, 1e-9)
        self._mass = kept + trials
        self._observe_slots(slots, reached, accepted, elapsed)

    def forget(self, slot: int) -> None:
        """Its request has ended."""
        self._slots[:, slot] = 0.0

    def _watch(self, trials: Floats, successes: Floats) -> None:
        """Where the last steps cannot be luck, what was learned before them hardly counts any more."""
        chances = np.clip(self.pooled(), 0.05, 0.95)
        self._surplus = RECENT * self._surplus + float((successes - trials * chances).sum())
        self._variance = RECENT**2 * self._variance + float((trials * chances * (1.0 - chances)).sum())
        if abs(self._surplus) > CHANGED * math.sqrt(self._variance):
            self._mass = np.minimum(self._mass, CHANGED_TRIALS)
            self._surplus = self._variance = 0.0

    def _observe_slots(self, slots: Ints, reached: Ints, accepted: Ints, elapsed: float) -> None:
        chances = self.pooled()
        expected = np.concatenate([[0.0], np.cumsum(chances)])[reached]
        variance = np.concatenate([[0.0], np.cumsum(chances * (1.0 - chances))])[reached]
        kept = math.exp(-elapsed / REQUEST_SECONDS)
        self._slots[:4] *= kept
        self._slots[4] *= kept**2
        self._slots[:, slots] += np.stack([accepted, expected, reached, variance, variance])
        stood, usual, _, weight, noise = self._slots[:, slots]
        surplus = stood - usual
        surplus -= weight * (surplus.sum() / weight.sum())  # a change of all is the pool's to learn
        # What chance alone gives, and as much again as it could by luck, is no difference.
        luck = 1.0 + 3.0 * math.sqrt(2.0 / len(slots))
        spread = float((surplus**2).sum() - luck * noise.sum()) / max(float((weight**2).sum()), 1e-9)
        follow = 1.0 - math.exp(-elapsed / REQUEST_SECONDS)
        self._spread += follow * (min(max(spread, 0.0), 9.0) - self._spread)


def _at_least(counts: Ints, length: int) -> Floats:
    """How many of them reach 1, 2, … length."""
    return np.bincount(counts, minlength=length + 1)[: length + 1][::-1].cumsum()[::-1][1:].astype(np.float64)
