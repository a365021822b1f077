"""One load on one fleet under one driver, in simulated time, and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from tests.fleet.drivers import EVERY, Driver
from tests.fleet.loads import Load
from tests.fleet.pod import Pod, Request
from tests.fleet.service import Service

PROMPT = 5.0  # seconds of queueing beyond which a request is no longer worth its tokens
PACE = 1 / 12  # seconds a token beyond which it is no longer either
WARM = 120.0  # seconds of the first level of the load before anything is counted


class Moment(NamedTuple):
    """How it stood after a look."""

    now: float
    replicas: int  # asked for
    ready: int
    in_flight: int
    state: str  # of speculation


@dataclass
class Result:
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
        return [after.now for before, after in pairwise(self.moments) if before.state != after.state]

    @property
    def scale_steps(self) -> list[tuple[Moment, Moment]]:
        """Before and after each change of the number of replicas."""
        return [(before, after) for before, after in pairwise(self.moments) if before.replicas != after.replicas]

    def seconds_in(self, state: str) -> float:
        return EVERY * sum(each.state == state for each in self.moments)

    # -- what must not happen

    def oscillations(self, window: float) -> list[float]:
        """Turns of speculation that come sooner after the one before than its stabilization window."""
        return [later for earlier, later in pairwise(self.toggles) if later - earlier < window]

    def runaways(self, target: int) -> list[float]:
        """Steps up beyond what the requests in flight asked for: capacity to come that was not counted as such."""
        return [
            after.now
            for before, after in self.scale_steps
            if after.replicas > before.replicas
            and after.replicas > math.ceil(max(m.in_flight for m in self._since(after.now - 60, after.now)) / target)
        ]

    def resaturations(self, within: float = 120.0) -> list[float]:
        """Steps down that were followed by saturation though no more was asked than in the minutes before."""
        found = []
        for before, after in self.scale_steps:
            then = [turned for turned in self.toggles if after.now < turned <= after.now + within]
            if after.replicas < before.replicas and before.state == "Active" and then:
                earlier = max(self.load.rate(after.now - 5 * n) for n in range(60))
                if self.load.rate(then[0] - 30) <= earlier:
                    found.append(after.now)
        return found

    def _since(self, start: float, end: float) -> list[Moment]:
        return [moment for moment in self.moments if start <= moment.now <= end]


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
        in_flight = sum(pod.running + pod.waiting for pod in service.ready.values())
        result.moments.append(Moment(service.now, replicas, len(service.ready), in_flight, state))
        service.scale(replicas)
    service.advance(service.now + 60)
    result.pod_seconds = service.pod_seconds
    return result


def _is_good(request: Request) -> bool:
    if request.started is None or request.finished is None:
        return False
    prompt = request.started - request.arrived <= PROMPT
    return prompt and request.finished - request.started <= PACE * request.tokens
