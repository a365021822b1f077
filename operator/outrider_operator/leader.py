"""The Lease: one of several operators works, the others wait. A holder that cannot renew in time stops working.

Whether a Lease has run out is judged by our own clock, by how long its record has not changed: the clocks of two
machines are never compared (as client-go does it). Losing it ends the process, since nothing half-done needs saving.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from outrider_operator.errors import Conflict, NotFound, OutriderError
from outrider_operator.kinds import KINDS
from outrider_operator.kube import Kube

log = logging.getLogger(__name__)


class LeaseLost(OutriderError):
    pass


class Leader:
    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        seconds: int = 15,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._namespace, self._name, self._identity = kube, namespace, name, identity
        self._seconds, self._clock = seconds, clock
        self._seen: tuple[Any, ...] = ()  # the record as last read, and since when it is so
        self._since = 0.0
        self._renewed = float("-inf")

    @property
    def held(self) -> bool:
        """True only while nobody else can have taken it: we stop a third before others may start."""
        return self._clock() - self._renewed < self._seconds * 2 / 3

    async def acquire(self) -> None:
        """Returns once the Lease is ours."""
        waiting = False
        while not await self._tried():
            if not waiting:
                log.info("waiting for the Lease", extra={"lease": self._name, "holder": self._seen[:1]})
            waiting = True
            await asyncio.sleep(self._seconds / 7 * random.uniform(0.8, 1.2))
        log.info("holding the Lease", extra={"lease": self._name, "identity": self._identity})

    async def keep(self) -> None:
        """Renews for ever. Raises LeaseLost when it is somebody else's or could not be renewed in time."""
        while True:
            await asyncio.sleep(self._seconds / 7)
            if not await self._tried() and (not self.held or self._holder() != self._identity):
                raise LeaseLost(f"Lease {self._name} is lost to {self._holder() or 'nobody'}")

    async def release(self) -> None:
        """Let the next one start at once instead of waiting for the Lease to run out."""
        self._renewed = float("-inf")
        with suppress(OutriderError):
            lease = await self._kube.get("Lease", self._namespace, self._name)
            if lease["spec"].get("holderIdentity") == self._identity:
                await self._kube.update(
                    {**lease, "spec": {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}
                )

    def _holder(self) -> str:
        return str(self._seen[0]) if self._seen else ""

    async def _tried(self) -> bool:
        """One attempt to create, take or renew it."""
        started = self._clock()
        try:
            async with asyncio.timeout(self._seconds / 3):
                held = await self._attempt()
        except Conflict:
            return False
        except (OutriderError, TimeoutError) as error:
            log.warning("the Lease could not be read or written: %s", error, extra={"lease": self._name})
            return False
        if held:
            self._renewed = started
        return held

    async def _attempt(self) -> bool:
        try:
            lease = await self._kube.get("Lease", self._namespace, self._name)
        except NotFound:
            metadata = {"namespace": self._namespace, "name": self._name}
            body = {"apiVersion": KINDS["Lease"].api_version, "kind": "Lease", "metadata": metadata}
            self._see(await self._kube.create({**body, "spec": self._record({}, taken=True)}))
            return True
        self._see(lease)
        spec = lease.get("spec", {})
        ours, free = self._holder() == self._identity, not self._holder()
        if not ours and not free and self._clock() - self._since < spec.get("leaseDurationSeconds", self._seconds):
            return False
        self._see(await self._kube.update({**lease, "spec": self._record(spec, taken=not ours)}))
        return True

    def _see(self, lease: Mapping[str, Any]) -> None:
        spec = lease.get("spec", {})
        seen = (spec.get("holderIdentity") or "", spec.get("renewTime"), spec.get("acquireTime"))
        if seen != self._seen:
            self._seen, self._since = seen, self._clock()

    def _record(self, before: dict[str, Any], taken: bool) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        transitions = before.get("leaseTransitions", 0)
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._seconds,
            "acquireTime": now if taken else before.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": transitions + 1 if taken and before else transitions,
        }
