"""A simulated fleet under a real API server and the real operator, with time running faster than it does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.cluster.operator_rig import Rig
from tests.fleet.admin import AdminPorts
from tests.fleet.service import Service

from outrider_operator.clock import Clock

STEP = 0.05  # seconds of real time between looks of the hand that plays controllers and kubelets


def fast(speed: float) -> Clock:
    """A clock that runs `speed` times as fast."""
    began, wall = time.monotonic(), datetime.now(UTC)

    def monotonic() -> float:
        return (time.monotonic() - began) * speed

    return Clock(
        monotonic=monotonic,
        wall=lambda: wall + timedelta(seconds=monotonic()),
        sleep=lambda seconds: asyncio.sleep(seconds / speed),
    )


class FastFleet:
    """Makes the pods that the Deployment asks for, lets them start and serve, and takes away those it does not."""

    def __init__(self, rig: Rig, service: Service, ports: AdminPorts, clock: Clock, model: str = "llama") -> None:
        self._rig, self._ports, self._clock, self._model = rig, ports, clock, model
        self.service = service
        self.addresses: dict[str, str] = {}
        self._ready: set[str] = set()
        self._began = clock.monotonic()

    async def look(self) -> None:
        deployment = await self._rig.need("Deployment", self._model)
        self.service.advance(max(self.service.now, self._clock.monotonic() - self._began))
        self.service.scale(deployment["spec"]["replicas"])
        for name in [name for name in self.service.places if name not in self.addresses]:
            await self._start(name)
        await asyncio.gather(*(self._end(name) for name in list(self.addresses) if name not in self.service.places))
        await asyncio.gather(*(self._serve(name) for name in self.service.ready if name not in self._ready))
        counts = {
            "replicas": len(self.service.places),
            "updatedReplicas": len(self.service.places),
            "readyReplicas": len(self._ready),
            "availableReplicas": len(self._ready),
            "observedGeneration": deployment["metadata"]["generation"],
        }
        before = deployment.get("status", {})
        if {name: before.get(name, 0) for name in counts} != counts:
            await self._rig.set_status("Deployment", self._model, counts)

    async def _start(self, name: str) -> None:
        pod = self.service.places[name].pod
        pod.put(await self._policy())
        self.addresses[name] = await self._ports.open(pod, await self._rig.token(self._model))
        await self._rig.pod(name, self.addresses[name], ready=False, model=self._model)

    async def _serve(self, name: str) -> None:
        await self._rig.pod_status(name, self.addresses[name], ready=True)
        self._ready.add(name)

    async def _end(self, name: str) -> None:
        await self._rig.delete("Pod", name)
        await self._ports.close(self.addresses.pop(name))
        self._ready.discard(name)

    async def _policy(self) -> Any:
        return json.loads((await self._rig.need("ConfigMap", f"{self._model}-policy"))["data"]["policy"])


@asynccontextmanager
async def living(rig: Rig, service: Service, clock: Clock) -> AsyncIterator[FastFleet]:
    """The fleet lives on in the background; what goes wrong there comes out at the end."""
    async with AdminPorts() as ports:
        fleet = FastFleet(rig, service, ports, clock)

        async def live() -> None:
            while True:
                await fleet.look()
                await asyncio.sleep(STEP)

        life = asyncio.create_task(live())
        try:
            yield fleet
        finally:
            life.cancel()
            with suppress(asyncio.CancelledError):
                await life
