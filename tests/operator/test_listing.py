from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.operator.fake_kube import FakeKube

from outrider_operator.cache import Cache, Key
from outrider_operator.errors import NotFound, Unavailable
from outrider_operator.kinds import KINDS
from outrider_operator.listing import Lister
from outrider_operator.queue import Queue

LLAMA = Key("team", "llama")
WATCHED = [KINDS["SpeculativeModel"], KINDS["ConfigMap"]]


def put(kube: FakeKube, kind: str, name: str, **more: Any) -> dict[str, Any]:
    labels = {"outrider.dev/model": "llama"}
    return kube.put(
        {"apiVersion": "v1", "kind": kind, "metadata": {"namespace": "team", "name": name, "labels": labels}, **more}
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Setting:
    def __init__(self) -> None:
        self.kube, self.cache, self.clock = FakeKube(), Cache(), Clock()
        self.queue = Queue()
        self.lister = Lister(self.kube, self.cache, self.queue, WATCHED, (), 600, self.clock)
        put(self.kube, "SpeculativeModel", "llama")
        put(self.kube, "ConfigMap", "llama-policy")

    def drain(self) -> list[Key]:
        keys = []
        while (key := self.queue.take()) is not None:
            self.queue.done(key)
            keys.append(key)
        return keys


@pytest.fixture
def setting() -> Setting:
    return Setting()


async def test_the_first_list_looks_at_every_object_once(setting: Setting) -> None:
    await setting.lister.first()
    assert setting.drain() == [LLAMA]
    assert setting.cache.count() == {"SpeculativeModel": 1, "ConfigMap": 1}


async def test_a_list_wakes_the_owner_of_a_deleted_child(setting: Setting) -> None:
    await setting.lister.first()
    setting.drain()
    del setting.kube.objects["ConfigMap", "team", "llama-policy"]
    await setting.lister.once()
    assert setting.drain() == [LLAMA]
    assert setting.cache.of_model(LLAMA) == []


async def test_a_list_without_news_wakes_nobody(setting: Setting) -> None:
    await setting.lister.first()
    setting.drain()
    await setting.lister.once()
    assert setting.drain() == []


async def test_the_first_list_waits_for_the_crd_and_the_api_server(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([NotFound("no such kind"), Unavailable("connection refused")])

    def fault(verb: str, kind: str, name: str) -> None:
        if failure := next(failures, None):
            raise failure

    async def at_once(seconds: float) -> None:
        return None

    setting.kube.fault = fault
    monkeypatch.setattr(asyncio, "sleep", at_once)
    await setting.lister.first()
    assert setting.drain() == [LLAMA]


async def test_a_watch_that_is_silent_about_changes_twice_is_trouble(setting: Setting) -> None:
    await setting.lister.first()
    for number in range(2):
        assert setting.lister.trouble() == ""
        put(setting.kube, "ConfigMap", "llama-policy", data={"n": str(number)})
        await setting.lister.once()
    assert "ConfigMap" in setting.lister.trouble()


async def test_a_watch_that_says_something_is_no_trouble(setting: Setting) -> None:
    await setting.lister.first()
    for number in range(3):
        put(setting.kube, "ConfigMap", "llama-policy", data={"n": str(number)})
        setting.lister.heard("ConfigMap")
        await setting.lister.once()
    assert setting.lister.trouble() == ""


async def test_lists_that_stopped_are_trouble(setting: Setting) -> None:
    await setting.lister.first()
    setting.clock.now += 1801
    assert "nothing could be listed for 1801 s" in setting.lister.trouble()
