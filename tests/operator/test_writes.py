from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.fake_kube import FakeKube

from outrider_operator.cache import Cache, Key
from outrider_operator.errors import Unavailable
from outrider_operator.handlers import Frames
from outrider_operator.listing import Lister
from outrider_operator.queue import Queue
from outrider_operator.writes import Writes

LLAMA = Key("team", "llama")
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"namespace": "team", "name": "llama", "labels": {"outrider.dev/model": "llama"}},
    "spec": {"ports": [{"port": 80}]},
}
MODEL = {
    "apiVersion": "outrider.dev/v1alpha1",
    "kind": "SpeculativeModel",
    "metadata": {"namespace": "team", "name": "llama", "generation": 1},
    "spec": {},
}


class Setting:
    """An API server whose frames come when the test says so, in the middle of a write as well."""

    def __init__(self) -> None:
        self.kube, self.cache, self.queue = FakeKube(), Cache(), Queue()
        self.writes = Writes(self.kube, self.cache, self.queue)
        self.frames = Frames(self.cache, self.queue, Lister(self.kube, self.cache, self.queue, (), ()), self.writes)
        self.model = self.kube.put(MODEL)
        self.frame(self.model)
        self.woken()

    def frame(self, body: dict[str, Any], change: str = "MODIFIED") -> None:
        self.frames.take(body["kind"], change, copy.deepcopy(body))

    def woken(self) -> bool:
        key = self.queue.take()
        if key:
            self.queue.done(key)
        return key == LLAMA

    def before_the_answer(self, verb: str, happen: Callable[[dict[str, Any]], None]) -> None:
        """`happen` is given what the write made, before the writer is."""
        send = getattr(self.kube, verb)

        async def slow(body: dict[str, Any]) -> dict[str, Any]:
            answer = await send(body)
            happen(answer)
            return dict(answer)

        setattr(self.kube, verb, slow)


@pytest.fixture
def setting() -> Setting:
    return Setting()


async def test_the_echo_of_a_write_wakes_nobody_before_and_after_its_answer(setting: Setting) -> None:
    setting.before_the_answer("apply", setting.frame)
    answer = await setting.writes.apply(SERVICE)
    assert not setting.woken()
    setting.frame(answer)
    assert not setting.woken()
    assert setting.cache.get("Service", LLAMA) is not None


async def test_somebody_elses_change_during_a_write_wakes(setting: Setting) -> None:
    def change(made: dict[str, Any]) -> None:
        setting.frame(made)
        setting.frame(setting.kube.put({**made, "spec": {"ports": [{"port": 81}]}}))

    setting.before_the_answer("apply", change)
    await setting.writes.apply(SERVICE)
    assert setting.woken()


async def test_a_deletion_during_a_write_wakes(setting: Setting) -> None:
    def delete(made: dict[str, Any]) -> None:
        setting.frame(made)
        version = str(int(made["metadata"]["resourceVersion"]) + 1)
        setting.frame({**made, "metadata": {**made["metadata"], "resourceVersion": version}}, "DELETED")

    setting.before_the_answer("apply", delete)
    await setting.writes.apply(SERVICE)
    assert setting.woken()
    assert setting.cache.get("Service", LLAMA) is None


async def test_a_write_whose_answer_is_lost_wakes_by_its_frame(setting: Setting) -> None:
    def lose(made: dict[str, Any]) -> None:
        setting.frame(made)
        raise Unavailable("connection reset")

    setting.before_the_answer("apply", lose)
    with pytest.raises(Unavailable):
        await setting.writes.apply(SERVICE)
    assert setting.woken()


async def test_another_objects_frame_during_a_write_wakes(setting: Setting) -> None:
    other = {**SERVICE, "kind": "ConfigMap"}
    setting.before_the_answer("apply", lambda _: setting.frame(setting.kube.put(other)))
    await setting.writes.apply(SERVICE)
    assert setting.woken()


async def test_a_status_written_wakes_nobody(setting: Setting) -> None:
    setting.before_the_answer("apply_status", setting.frame)
    await setting.writes.apply_status({**MODEL, "status": {"replicas": 1}})
    assert not setting.woken()


@pytest.mark.parametrize("change", [{"generation": 2}, {"annotations": {"outrider.dev/upgrade": "now"}}])
async def test_an_edit_that_a_status_write_overtook_wakes_although_its_frame_is_old_news(
    setting: Setting, change: dict[str, Any]
) -> None:
    edited = setting.kube.put({**MODEL, "metadata": {**MODEL["metadata"], **change}})  # type: ignore[dict-item]
    await setting.writes.apply_status({**MODEL, "status": {"replicas": 1}})
    assert setting.woken()
    setting.frame(edited)
    assert not setting.woken()
