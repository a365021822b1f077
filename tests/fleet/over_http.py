"""The operator's decisions on simulated pods over real HTTP, in simulated time: reading and telling as the operator
does, with nothing left out but the API server."""

from __future__ import annotations

from dataclasses import dataclass, field

import aiohttp
from tests.fleet.admin import AdminPorts, Fault
from tests.fleet.drivers import EVERY
from tests.fleet.pod import Pod
from tests.fleet.service import Service
from tests.operator.build import Cluster, pod

from outrider_operator.fleet.measure import put_policy, read_pods
from outrider_operator.observe import Pod as SeenPod

TOKEN = "TOKEN"


@dataclass
class OverHttp(Cluster):
    """`service` is what is asked and who serves it; `ports` are where its pods are reached."""

    service: Service = field(default_factory=lambda: Service((), lambda now: Pod(now=now)))
    ports: AdminPorts = field(default_factory=AdminPorts)
    session: aiohttp.ClientSession | None = None
    addresses: dict[str, str] = field(default_factory=dict)

    async def live(self, seconds: float) -> None:
        """Rounds of five simulated seconds."""
        for _ in range(round(seconds / EVERY)):
            self.service.advance(self.service.now + EVERY)
            self.now = 1000 + self.service.now
            await self._place()
            ready = [each for each, _ in self.pods.values() if each.ready]
            assert self.session is not None
            self.measured(await read_pods(self.session, ready, clock=lambda: self.now))
            await self._tell(ready)
            self.service.scale(self.replicas)

    def break_all(self, fault: Fault, but: int = 0) -> None:
        """Every pod there is now, but for so many, answers like that."""
        for number, address in enumerate(self.addresses.values()):
            self.ports.at(address).fault = fault if number >= but else Fault.NONE

    async def _place(self) -> None:
        """Addresses for pods that came, none for those that left."""
        places = self.service.places
        for name in [name for name in self.addresses if name not in places]:
            await self.ports.close(self.addresses.pop(name))
        for name in places:
            if name not in self.addresses:
                self.addresses[name] = await self.ports.open(places[name].pod, TOKEN)
        self.pods = {
            name: (pod(name, ip=self.addresses[name], template=self.template, ready=place.ready), 0.0)
            for name, place in places.items()
        }
        self.counted()

    async def _tell(self, ready: list[SeenPod]) -> None:
        planned = self.plans[-1][1]
        assert self.session is not None
        for each in ready:
            policy, samples = planned.policy_of(each.name), self.fleet.samples.get(each.name, ())
            answer = samples[-1].answer if samples else None
            if policy and answer and answer.revision != policy.revision:
                await put_policy(self.session, each, policy, TOKEN)
