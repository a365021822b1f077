"""What may go wrong between the operator and the API server, and the same end in each case."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from localcluster.controlplane import ControlPlane
from tests.cluster.operator_rig import CHILDREN, Rig, eventually, smallest

from outrider_operator.cache import Cache
from outrider_operator.errors import Conflict, Rejected, Unavailable
from outrider_operator.leader import LeaseLost

pytest_plugins = ["tests.cluster.operator_fixtures"]

CHILD_AND_STATUS_WRITES = 6  # Secret, ConfigMap, Deployment, Service, PodDisruptionBudget, status
IMPATIENT = {"retry_seconds": 0.01, "retry_limit_seconds": 0.02}  # where a dozen failures follow each other


def _content(body: dict[str, Any]) -> Any:
    """What must be equal however the object came to be: no names of this run, versions, times or random tokens."""
    kept = {part: body[part] for part in ("spec", "status") if part in body}
    if body["kind"] == "ConfigMap":
        kept["data"] = body["data"]["policy"]

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: timeless(v) for k, v in value.items() if not k.endswith("Time") and "IP" not in k}
        return [timeless(each) for each in value] if isinstance(value, list) else value

    return timeless(kept)


async def _fixpoint(rig: Rig) -> dict[str, Any]:
    kinds = [("SpeculativeModel", "{}"), *CHILDREN[1:]]
    return {kind: _content(await rig.need(kind, pattern.format("llama"))) for kind, pattern in kinds}


async def test_killed_after_any_write_it_goes_on_from_there_to_the_same_end(rig: Rig) -> None:
    undisturbed = await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    await undisturbed.stop()
    expected, writes = await _fixpoint(rig), len(undisturbed.kube.writes)
    assert writes >= CHILD_AND_STATUS_WRITES

    for killed_after in range(1, writes + 1):
        await rig.delete("SpeculativeModel", "llama")
        for kind, pattern in CHILDREN:
            await rig.delete(kind, pattern.format("llama"))
        await rig.create(smallest())
        reached = asyncio.Event()
        victim = await rig.operator(settings={"concurrency": 1}, after=_stopping_at(killed_after, reached))
        async with asyncio.timeout(60):
            await reached.wait()
        await victim.kill()
        assert len(victim.kube.writes) == killed_after
        successor = await rig.operator()
        await eventually(rig.is_settled, f"the end after a kill at write {killed_after}")
        await successor.stop()
        assert await _fixpoint(rig) == expected, f"killed after write {killed_after}"


def _stopping_at(write: int, reached: asyncio.Event) -> Callable[[str, str, str], Awaitable[None]]:
    """Nothing after that write is ever done."""
    count, loop = itertools.count(1), asyncio.get_running_loop()

    async def after(verb: str, kind: str, name: str) -> None:
        if verb not in ("get", "list") and next(count) >= write:
            loop.call_soon_threadsafe(reached.set)
            await asyncio.Event().wait()

    return after


FAULTS: dict[str, Callable[[], Exception]] = {
    "409": lambda: Conflict("injected"),
    "429": lambda: Unavailable("injected", retry_after=0.1),
    "500": lambda: Rejected("injected", 500),
    "503": lambda: Unavailable("injected"),
    "timeout": lambda: Unavailable("injected: TimeoutError"),
}


def _failing(times: int, fault: Callable[[], Exception]) -> Callable[[str, str, str], Awaitable[None]]:
    """Each distinct request fails so many times before it gets through."""
    left: dict[tuple[str, str, str], Iterator[int]] = {}

    async def fail(verb: str, kind: str, name: str) -> None:
        tries = iter(range(1 if verb == "list" else times))
        if kind != "Event" and next(left.setdefault((verb, kind, name), tries), None) is not None:
            raise fault()

    return fail


@pytest.mark.parametrize("name", FAULTS)
async def test_every_request_may_fail_before_it_is_done(rig: Rig, name: str) -> None:
    await rig.operator(settings=IMPATIENT, before=_failing(2, FAULTS[name]))
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status", 40)
    await eventually(lambda: _accepted(rig), "it is accepted")


@pytest.mark.parametrize("name", ["500", "timeout"])
async def test_every_request_may_be_done_and_its_answer_lost(rig: Rig, name: str) -> None:
    await rig.operator(settings=IMPATIENT, after=_failing(1, FAULTS[name]))
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status", 40)
    await eventually(lambda: _accepted(rig), "it is accepted")
    assert len(await rig.all("Deployment")) == 1


async def test_the_api_server_may_be_restarted(rig: Rig, control_plane: ControlPlane) -> None:
    operator = await rig.operator()
    await rig.create(smallest("before"))
    await eventually(lambda: rig.is_settled("before"), "before")
    await asyncio.to_thread(control_plane.restart_api_server)
    await rig.create(smallest("after"))
    await eventually(lambda: rig.is_settled("after"), "after", 60)

    def break_service(body: dict[str, Any]) -> None:
        body["spec"]["selector"] = {"app": "elsewhere"}

    await rig.edit("Service", "before", break_service)

    async def repaired() -> bool:
        return "app" not in (await rig.need("Service", "before"))["spec"]["selector"]

    await eventually(repaired, "the watches are back")
    await operator.stop()


async def test_objects_deleted_while_the_operator_is_down_are_made_anew(rig: Rig) -> None:
    first = await rig.operator()
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    await first.stop()
    for kind in ("Secret", "ConfigMap", "Deployment", "Service"):
        await rig.delete(kind, dict(CHILDREN)[kind].format("llama"))
    await rig.operator()
    await eventually(rig.is_settled, "children and status")


async def test_what_a_watch_never_told_is_found_by_the_next_list(rig: Rig) -> None:
    operator = await rig.operator(settings={"relist_seconds": 1})
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status")
    deaf = pytest.MonkeyPatch()
    try:
        deaf.setattr(Cache, "remove", lambda self, body: frozenset())
        await rig.delete("Service", "llama")
        await eventually(lambda: _exists(rig, "Service", "llama"), "it is back by a list alone")
    finally:
        deaf.undo()
    await operator.stop()


async def test_of_two_operators_one_works_and_the_other_takes_over(rig: Rig) -> None:
    elected = {"leader_elect": True, "lease_seconds": 15}  # long, so that a busy machine takes it from nobody
    first = await rig.operator(settings=elected | {"identity": "first"})
    second = asyncio.create_task(rig.operator(settings=elected | {"identity": "second"}))
    await rig.create(smallest("one"))
    await eventually(lambda: rig.is_settled("one"), "one")
    assert not second.done()
    await first.stop()
    async with asyncio.timeout(60):
        standby = await second
    await rig.create(smallest("two"))
    await eventually(lambda: rig.is_settled("two"), "two")
    assert {name.split("-")[0] for _, kind, name in standby.kube.writes if kind != "Event"} == {"two"}


async def test_a_leader_that_cannot_renew_its_lease_ends(rig: Rig) -> None:
    async def before(verb: str, kind: str, name: str) -> None:
        if kind == "Lease" and cut.is_set():
            raise Unavailable("injected: connection refused")

    cut = asyncio.Event()
    operator = await rig.operator(
        settings={"leader_elect": True, "lease_seconds": 3, "identity": "lone"}, before=before
    )
    cut.set()
    assert isinstance(await operator.end(), LeaseLost)
    rig.forget(operator)


async def _accepted(rig: Rig) -> bool:
    return (await rig.condition("Accepted"))["status"] == "True"


async def _exists(rig: Rig, kind: str, name: str) -> bool:
    return await rig.get(kind, name) is not None
