"""A simulated fleet behind one Service: pods start and end, and each request goes to a ready one by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.fleet.pod import Pod, Request


@dataclass
class Place:
    """A pod that was asked for, and when it will serve."""

    pod: Pod
    ready_at: float

    @property
    def ready(self) -> bool:
        return self.pod.now >= self.ready_at


@dataclass
class Service:
    """Times are seconds of the simulation. `make` makes a pod that starts at a moment."""

    arrivals: Iterable[Request]
    make: Callable[[float], Pod]
    starts_in: float = 90.0
    room: int = 1000  # pods that can be scheduled
    seed: int = 0
    now: float = 0.0
    places: dict[str, Place] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)  # all that came
    pod_seconds: float = 0.0  # of all pods that were asked for

    def __post_init__(self) -> None:
        self._coming = iter(self.arrivals)
        self._next = next(self._coming, None)
        self._choose = random.Random(self.seed)
        self._leaving: list[Pod] = []
        self._made = 0

    def scale(self, replicas: int) -> None:
        """As a ReplicaSet does: those that do not serve yet go first, then the newest; who leaves finishes its work."""
        while len(self.places) < replicas:
            self._made += 1
            scheduled = sum(place.ready_at < float("inf") for place in self.places.values()) < self.room
            ready_at = self.now + self.starts_in if scheduled else float("inf")
            self.places[f"llama-{self._made:04}"] = Place(self.make(self.now), ready_at)
        while len(self.places) > replicas:
            name = max(self.places, key=lambda each: (not self.places[each].ready, each))
            self._leaving.append(self.places.pop(name).pod)

    @property
    def ready(self) -> dict[str, Pod]:
        return {name: place.pod for name, place in self.places.items() if place.ready}

    def advance(self, to: float) -> None:
        """Serve until then. A request that finds nobody, or a full queue, is turned away."""
        self.pod_seconds += len(self.places) * (to - self.now)
        while self._next is not None and self._next.arrived <= to:
            request, self._next = self._next, next(self._coming, None)
            self.requests.append(request)
            ready = [p.pod for p in self.places.values() if request.arrived >= p.ready_at]
            if ready:
                pod = self._choose.choice(ready)
                pod.advance(request.arrived)
                pod.arrive(request)
        for pod in (*(place.pod for place in self.places.values()), *self._leaving):
            pod.advance(to)
        self._leaving = [pod for pod in self._leaving if pod.running or pod.waiting]
        self.now = to
