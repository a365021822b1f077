from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.operator.fake_kube import FakeKube

from outrider_operator.errors import Unavailable
from outrider_operator.leader import Leader, LeaseLost


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def leader(kube: FakeKube, clock: Clock, identity: str = "one", seconds: int = 15) -> Leader:
    return Leader(kube, "system", "operator", identity, seconds, clock)


def spec(kube: FakeKube) -> dict[str, Any]:
    return kube.objects["Lease", "system", "operator"]["spec"]


async def test_a_lease_that_nobody_has_is_taken() -> None:
    kube, clock = FakeKube(), Clock()
    one = leader(kube, clock)
    assert not one.held
    await one.acquire()
    assert one.held
    assert spec(kube)["holderIdentity"] == "one"
    assert spec(kube)["leaseTransitions"] == 0


async def test_a_lease_in_use_is_not_taken_until_it_has_not_changed_for_its_duration() -> None:
    kube, clock = FakeKube(), Clock()
    one, two = leader(kube, clock), leader(kube, clock, "two")
    await one.acquire()
    assert not await two._tried()
    clock.now += 10
    await one._tried()
    assert not await two._tried()
    clock.now += 14
    assert not await two._tried()
    clock.now += 1
    assert await two._tried()
    assert spec(kube)["holderIdentity"] == "two"
    assert spec(kube)["leaseTransitions"] == 1


async def test_a_holder_stops_before_another_may_start() -> None:
    kube, clock = FakeKube(), Clock()
    one = leader(kube, clock)
    await one.acquire()
    clock.now += 9.9
    assert one.held
    clock.now += 0.2
    assert not one.held


async def test_the_same_identity_takes_its_lease_back_at_once() -> None:
    kube, clock = FakeKube(), Clock()
    await leader(kube, clock).acquire()
    assert await leader(kube, clock)._tried()


async def test_a_released_lease_is_taken_at_once() -> None:
    kube, clock = FakeKube(), Clock()
    one, two = leader(kube, clock), leader(kube, clock, "two")
    await one.acquire()
    assert not await two._tried()
    await one.release()
    assert not one.held
    assert await two._tried()


async def test_releasing_does_not_touch_a_lease_that_is_somebody_elses() -> None:
    kube, clock = FakeKube(), Clock()
    one, two = leader(kube, clock), leader(kube, clock, "two")
    await one.acquire()
    await two._tried()
    clock.now += 15
    await two._tried()
    await one.release()
    assert spec(kube)["holderIdentity"] == "two"


async def test_two_that_start_at_once_do_not_both_get_it() -> None:
    kube, clock = FakeKube(), Clock()
    both = [leader(kube, clock, "one"), leader(kube, clock, "two")]
    assert sorted(await asyncio.gather(*(each._tried() for each in both))) == [False, True]


async def test_losing_it_to_another_is_an_error() -> None:
    kube, clock = FakeKube(), Clock()
    one = leader(kube, clock, seconds=1)
    await one.acquire()
    live = kube.objects["Lease", "system", "operator"]
    kube.put({**live, "spec": {**live["spec"], "holderIdentity": "two"}})
    async with asyncio.timeout(60):
        with pytest.raises(LeaseLost, match="lost to two"):
            await one.keep()


async def test_an_api_server_that_is_away_for_too_long_is_an_error() -> None:
    kube, clock = FakeKube(), Clock()
    one = leader(kube, clock, seconds=1)
    await one.acquire()

    def fault(verb: str, kind: str, name: str) -> None:
        clock.now += 0.2
        raise Unavailable("connection refused")

    kube.fault = fault
    async with asyncio.timeout(60):
        with pytest.raises(LeaseLost):
            await one.keep()


async def test_a_short_outage_is_survived() -> None:
    kube, clock = FakeKube(), Clock()
    one = leader(kube, clock, seconds=1)
    await one.acquire()
    failures = iter([True, True, False])

    def fault(verb: str, kind: str, name: str) -> None:
        if next(failures, False):
            raise Unavailable("connection refused")

    kube.fault = fault
    keeping = asyncio.create_task(one.keep())
    async with asyncio.timeout(60):
        while len(kube.writes) < 3:
            await asyncio.sleep(0.01)
    assert not keeping.done()
    keeping.cancel()
