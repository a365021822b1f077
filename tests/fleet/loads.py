"""How much is asked of a fleet over time: the patterns, and the requests that come of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.fleet.pod import Request


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` is in requests per second at a moment, in seconds from the beginning, and never above `peak`."""

    name: str
    seconds: float
    peak: float
    rate: Callable[[float], float]

    def requests(self, seed: int = 0, mean_tokens: float = 200.0) -> Iterator[Request]:
        """Poisson arrivals of requests of exponential length, the same for the same seed."""
        draw, now = random.Random(f"{self.name} {seed}"), 0.0
        while (now := now + draw.expovariate(self.peak)) < self.seconds:
            if draw.random() * self.peak < self.rate(now):
                yield Request(now, max(8, round(draw.expovariate(1 / mean_tokens))))


def step(
    low: float = 3.0, high: float = 15.0, at: float = 600.0, until: float = 1800.0, seconds: float = 2700.0
) -> Load:
    return Load("step", seconds, high, lambda now: high if at <= now < until else low)


def ramp(low: float = 2.0, high: float = 18.0, seconds: float = 2700.0) -> Load:
    """Up to the middle, and down again."""
    half = seconds / 2
    return Load("ramp", seconds, high, lambda now: low + (high - low) * (1 - abs(now - half) / half))


def spike(
    low: float = 4.0, high: float = 11.0, every: float = 600.0, lasting: float = 60.0, seconds: float = 2700.0
) -> Load:
    """Spikes that are over before a replica would have started."""
    return Load("spike", seconds, high, lambda now: high if now % every >= every - lasting else low)


def diurnal(low: float = 2.0, high: float = 34.0, seconds: float = 3600.0) -> Load:
    """A day in an hour, whose noon needs all that eight replicas of the default pod can do."""
    middle, swing = (low + high) / 2, (high - low) / 2
    return Load("diurnal", seconds, high, lambda now: middle - swing * math.cos(2 * math.pi * now / seconds))


def flapping(low: float = 3.0, high: float = 10.0, every: float = 90.0, seconds: float = 2700.0) -> Load:
    """Between two levels, about as fast as decisions are made: what tempts a controller to swing along."""
    return Load("flapping", seconds, high, lambda now: high if now % every < every / 2 else low)


ALL = (step, ramp, spike, diurnal, flapping)
