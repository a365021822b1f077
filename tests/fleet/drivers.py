"""Who decides over a simulated fleet: Outrider's own plan, a rule like the HorizontalPodAutoscaler's, and an oracle
that knows the load."""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from tests.fleet.costs import Costs
from tests.fleet.loads import Load
from tests.fleet.service import Service
from tests.operator.build import Cluster, model, pod

from outrider_operator.api.v1alpha1 import Autoscaling
from outrider_operator.fleet.answer import parse_answer
from outrider_operator.fleet.samples import Sample

EVERY = 5.0  # seconds between looks


class Driver(Protocol):
    reflex: bool  # whether its pods choose their draft length themselves

    def look(self, service: Service) -> tuple[int, str]:
        """Replicas and the state of speculation from now on. It has told the pods itself."""


class Outrider(Cluster):
    """The operator's own decisions, status and memory included, on what pods answer; only transport is left out."""

    def __init__(self, *spec: dict[str, object], reflex: bool = False) -> None:
        super().__init__(model(*spec))
        self.reflex = reflex
        self.reconcile()

    def look(self, service: Service) -> tuple[int, str]:
        self.now = 1000 + service.now
        self._see(service)
        self.measured({name: self._read(name, service) for name in service.ready})
        planned = self.plans[-1][1]
        for name, each in service.ready.items():
            policy = planned.policy_of(name)
            if policy and policy.revision != each.policy.revision:
                each.put(policy.to_json())
        return self.replicas, self.state

    def _see(self, service: Service) -> None:
        template = self.template
        self.pods = {
            name: (pod(name, template=template, ready=place.ready), 0.0) for name, place in service.places.items()
        }
        self.counted()

    def _read(self, name: str, service: Service) -> Sample:
        return Sample(self.now, parse_answer(service.ready[name].body()))


class Hpa:
    """autoscaling/v2 with its defaults on in-flight requests per pod, speculation always on: every 15 s the ratio of
    mean to target, 10 % tolerance, up by at most double or four a step, down to the highest of five minutes."""

    reflex = False

    def __init__(self, scaling: Autoscaling) -> None:
        self._scaling, self._replicas = scaling, scaling.min_replicas
        self._looked = -math.inf
        self._wanted: deque[tuple[float, int]] = deque()

    def look(self, service: Service) -> tuple[int, str]:
        if service.now - self._looked >= 15 and service.ready:
            self._looked = service.now
            self._replicas = self._decide(service)
        return self._replicas, "Active"

    def _decide(self, service: Service) -> int:
        scaling, current, ready = self._scaling, len(service.places), service.ready.values()
        in_flight = sum(each.running + each.waiting for each in ready)
        ratio = in_flight / len(ready) / scaling.target_concurrency
        if ratio > 1:  # pods that start count as idle
            ratio = max(1.0, in_flight / current / scaling.target_concurrency)
            wanted = math.ceil(ratio * current)
        else:
            wanted = math.ceil(ratio * len(ready))
        if abs(ratio - 1) <= 0.1:
            wanted = current
        wanted = min(max(wanted, scaling.min_replicas), scaling.max_replicas)
        self._wanted.append((service.now, wanted))
        while self._wanted[0][0] < service.now - 300:
            self._wanted.popleft()
        if wanted > current:
            return min(wanted, max(2 * current, current + 4))
        return min(current, max(number for _, number in self._wanted))


class Oracle:
    """Knows the load and what is to come: replicas are ready when they are needed, and pods always draft what pays."""

    reflex = True

    def __init__(self, scaling: Autoscaling, load: Load, costs: Costs, acceptance: float, tokens: int) -> None:
        self._scaling, self._load = scaling, load
        at, mean_tokens = scaling.target_concurrency, 200.0
        best = costs.best(at, tokens, acceptance)
        self._each = at * costs.rate(at, best, acceptance) / mean_tokens  # requests per second at the target

    def look(self, service: Service) -> tuple[int, str]:
        ahead = (service.now + EVERY * n for n in range(math.ceil((service.starts_in + 60) / EVERY)))
        need = max(self._load.rate(moment) for moment in ahead)
        scaling = self._scaling
        wanted = min(max(math.ceil(need / self._each), scaling.min_replicas), scaling.max_replicas)
        return wanted, "Active"
