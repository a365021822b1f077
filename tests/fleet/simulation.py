"""One load on one fleet under one driver, in simulated time, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tests.fleet.drivers import EVERY, Driver
from tests.fleet.loads import Load
from tests.fleet.pod import Pod, Request
from tests.fleet.service import Service

PROMPT = 5.0  # seconds of queueing beyond which a request is no longer worth its tokens
PACE = 1 / 12  # seconds a token beyond which it is no longer either
WARM = 120.0  # seconds of the first level of the load before anything is counted


Moment = tuple[float, int, int, str]  # seconds, replicas, ready ones, state of speculation


@dataclass
class Result:
    """`moments` are how it stood after each look."""

    load: Load
    requests: list[Request]
    moments: list[Moment] = field(default_factory=list)
    pod_seconds: float = 0.0

    @property
    def goodput(self) -> float:
        """Tokens per second of requests that began and went on in time."""
        counted = [r for r in self.requests if r.arrived >= WARM]
        return sum(r.tokens for r in counted if _is_good(r)) / (self.load.seconds - WARM)

    @property
    def p99_queue_seconds(self) -> float:
        """Of the requests that were not turned away; one that gave up has waited until then."""
        ends = ((r, r.gave_up if r.started is None else r.started) for r in self.requests if r.arrived >= WARM)
        waits = sorted(end - r.arrived for r, end in ends if end is not None)
        return waits[min(len(waits) - 1, int(len(waits) * 0.99))] if waits else 0.0

    @property
    def turned_away(self) -> int:
        return sum(r.started is None for r in self.requests if r.arrived >= WARM)

    @property
    def toggles(self) -> list[float]:
        """When speculation turned."""
        return [now for (_, _, _, before), (now, _, _, after) in self._steps() if before != after]

    @property
    def scale_steps(self) -> list[tuple[float, int, int]]:
        """When the number of replicas changed, from what to what."""
        return [(now, before, after) for (_, before, _, _), (now, after, _, _) in self._steps() if before != after]

    def seconds_in(self, state: str) -> float:
        return EVERY * sum(each == state for _, _, _, each in self.moments)

    def _steps(self) -> Iterator[tuple[Moment, Moment]]:
        return pairwise(self.moments)


def run(load: Load, driver: Driver, starts_in: float = 90.0, room: int = 1000, seed: int = 0) -> Result:
    """From the load's first moment to its last. Nobody waits: an hour takes seconds."""

    def make(now: float) -> Pod:
        return Pod(now=now, reflex=driver.reflex)

    service = Service(load.requests(seed), make, starts_in=0.0, room=room, seed=seed)
    result = Result(load, service.requests)
    replicas, _ = driver.look(service)
    service.scale(replicas)  # the first are there already
    service.starts_in = starts_in
    while service.now < load.seconds:
        service.advance(service.now + EVERY)
        replicas, state = driver.look(service)
        service.scale(replicas)
        result.moments.append((service.now, replicas, len(service.ready), state))
    service.advance(service.now + 60)
    result.pod_seconds = service.pod_seconds
    return result


def _is_good(request: Request) -> bool:
    if request.started is None or request.finished is None:
        return False
    prompt = request.started - request.arrived <= PROMPT
    return prompt and request.finished - request.started <= PACE * request.tokens
