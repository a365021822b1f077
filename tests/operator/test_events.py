from __future__ import annotations

from datetime import UTC, datetime

import pytest
from tests.operator.fake_kube import FakeKube

from outrider_operator.api.reasons import EventReason
from outrider_operator.cache import Key
from outrider_operator.errors import Rejected, Unavailable
from outrider_operator.events import SAME, Publisher, rendered
from outrider_operator.observe import Model
from outrider_operator.plan import Event

MODEL = Model(namespace="team", name="llama", uid="u1", generation=1, spec=None)
SUSPENDED = Event(EventReason.SPECULATION_SUSPENDED, "16.2 requests run per replica")
RESUMED = Event(EventReason.SPECULATION_RESUMED, "8.1 requests run per replica")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def notes(kube: FakeKube) -> list[str]:
    return [body["note"] for (kind, _, _), body in kube.objects.items() if kind == "Event"]


def test_an_event_says_what_happened_to_which_object() -> None:
    body = rendered(MODEL, SUSPENDED, "pod-1", datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC))
    assert body["regarding"]["name"] == "llama"
    assert body["regarding"]["uid"] == "u1"
    assert (body["type"], body["reason"]) == ("Normal", "SpeculationSuspended")
    assert body["eventTime"] == "2026-01-02T03:04:05.000678Z"


@pytest.mark.parametrize("reason", [EventReason.POD_FAILED, EventReason.REFUSED, EventReason.DRAFT_REJECTED])
def test_failures_are_warnings(reason: EventReason) -> None:
    assert rendered(MODEL, Event(reason, "x"), "pod-1", datetime.now(UTC))["type"] == "Warning"


def test_a_note_is_cut_to_what_the_api_takes() -> None:
    assert len(rendered(MODEL, Event(EventReason.REFUSED, "x" * 5000), "pod-1", datetime.now(UTC))["note"]) == 1024


def test_a_note_is_cut_by_bytes_as_the_api_counts_them_and_within_no_character() -> None:
    note = rendered(MODEL, Event(EventReason.REFUSED, "x" + "模" * 500), "pod-1", datetime.now(UTC))["note"]
    assert note == "x" + "模" * 341


async def test_the_same_words_are_said_once() -> None:
    kube, clock = FakeKube(), Clock()
    publisher = Publisher(kube, "pod-1", clock)
    for _ in range(3):
        await publisher.publish(MODEL, [SUSPENDED])
    assert notes(kube) == [SUSPENDED.message]
    clock.now += SAME
    await publisher.publish(MODEL, [SUSPENDED])
    assert len(notes(kube)) == 2


async def test_there_and_back_and_there_again_is_three_transitions() -> None:
    kube = FakeKube()
    publisher = Publisher(kube, "pod-1", Clock())
    for event in (SUSPENDED, SUSPENDED, RESUMED, RESUMED, SUSPENDED):
        await publisher.publish(MODEL, [event])
    assert notes(kube) == [SUSPENDED.message, RESUMED.message, SUSPENDED.message]


async def test_the_same_step_of_replicas_after_the_way_back_is_told_again() -> None:
    kube = FakeKube()
    publisher = Publisher(kube, "pod-1", Clock())
    up = Event(EventReason.SCALED_UP, "from 1 to 2 replicas: 3 requests were rejected within 30 s")
    down = Event(EventReason.SCALED_DOWN, "from 2 to 1 replicas: at most 0.0 requests in flight within 60 s")
    for event in (up, up, down, down, up, down):
        await publisher.publish(MODEL, [event])
    assert notes(kube) == [each.message for each in (up, down, up, down)]


async def test_an_event_waits_for_an_api_server_that_is_away() -> None:
    kube = FakeKube()
    publisher = Publisher(kube, "pod-1", Clock())

    def away(verb: str, kind: str, name: str) -> None:
        raise Unavailable("connection refused")

    kube.fault, there = away, kube.fault
    await publisher.publish(MODEL, [SUSPENDED])
    assert notes(kube) == []
    kube.fault = there
    await publisher.publish(MODEL, [])
    assert notes(kube) == [SUSPENDED.message]


async def test_an_event_that_is_refused_is_dropped() -> None:
    kube = FakeKube()
    publisher = Publisher(kube, "pod-1", Clock())

    def ending(verb: str, kind: str, name: str) -> None:
        raise Rejected("the namespace is being terminated", 403)

    kube.fault, there = ending, kube.fault
    await publisher.publish(MODEL, [SUSPENDED])
    kube.fault = there
    await publisher.publish(MODEL, [RESUMED])
    assert notes(kube) == [RESUMED.message]


async def test_a_forgotten_object_may_say_the_same_again() -> None:
    kube = FakeKube()
    publisher = Publisher(kube, "pod-1", Clock())
    await publisher.publish(MODEL, [SUSPENDED])
    publisher.forget(Key("team", "llama"))
    await publisher.publish(MODEL, [SUSPENDED])
    assert len(notes(kube)) == 2
