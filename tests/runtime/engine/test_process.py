"""The engine's loop: what arrives is carried out between steps, and nothing runs while there is nothing to do."""

from __future__ import annotations

import queue

import pytest
from tests.runtime.server.fake_engine import FakeEngine

from outrider_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    PolicyApplied,
    SetPolicy,
    Shutdown,
    StepOutput,
)
from outrider_runtime.engine.process import run
from outrider_runtime.errors import BadRequest
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.speculation.policy import Policy

PARAMS = SamplingParams(max_tokens=4)


def _run(engine, *messages, steps_before_shutdown: int = 0):
    """What is sent when the messages are there from the start and Shutdown comes after so many step outputs."""
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    sent = []
    for message in messages:
        inbox.put(message)
    if not steps_before_shutdown:
        inbox.put(Shutdown())

    def send(message):
        sent.append(message)
        if len(sent) == steps_before_shutdown:
            inbox.put(Shutdown())

    run(engine, inbox, send)
    return sent


def test_one_message_a_step_carries_every_requests_tokens():
    sent = _run(FakeEngine(), AddRequest("a", (1,), PARAMS), AddRequest("b", (2,), PARAMS), steps_before_shutdown=2)
    assert [[(d.request_id, d.token_ids) for d in output.deltas] for output in sent] == [
        [("a", (65, 66)), ("b", (65, 66))],
        [("a", (67,)), ("b", (67,))],
    ]


def test_a_policy_is_answered_between_two_steps():
    policy = Policy(state="Suspended")
    sent = _run(FakeEngine(), AddRequest("a", (1,), PARAMS), SetPolicy(policy), steps_before_shutdown=3)
    assert isinstance(sent[0], PolicyApplied)
    assert sent[0].policy == policy
    assert [type(message) for message in sent[1:]] == [StepOutput, StepOutput]


def test_an_abort_that_leaves_nothing_to_do_still_tells_the_new_state():
    engine = FakeEngine()
    (output,) = _run(engine, AddRequest("a", (1,), PARAMS), AbortRequest("a"), steps_before_shutdown=1)
    assert output.deltas == ()
    assert output.stats.running == 0
    assert engine.aborted == ["a"]


def test_a_request_the_engine_refuses_is_answered_and_the_others_go_on():
    class Refusing(FakeEngine):
        def add(self, message):
            if message.request_id == "bad":
                raise BadRequest("no room")
            super().add(message)

    sent = _run(Refusing(), AddRequest("bad", (1,), PARAMS), AddRequest("good", (1,), PARAMS), steps_before_shutdown=2)
    assert [(d.request_id, d.finish_reason, d.error) for d in sent[0].deltas] == [
        ("bad", "error", "no room"),
        ("good", None, ""),
    ]


def test_shutdown_ends_it_with_requests_open():
    assert _run(FakeEngine(), AddRequest("a", (1,), PARAMS)) == []


def test_a_failing_step_is_not_swallowed():
    with pytest.raises(RuntimeError, match="broken"):
        _run(FakeEngine(fault=RuntimeError("broken")), AddRequest("a", (1,), PARAMS), steps_before_shutdown=1)


def test_what_is_left_to_prepare_is_done_a_piece_at_a_time_and_a_request_goes_before_the_next():
    class Unprepared(FakeEngine):
        left = 5
        added_after: int | None = None

        def idle(self):
            self.left -= 1
            if self.left == 3:
                inbox.put(AddRequest("a", (1,), PARAMS))
            if self.left == 0:
                inbox.put(Shutdown())
            return self.left > 0

        def step(self):
            self.added_after = self.left if self.added_after is None else self.added_after
            return super().step()

    inbox: queue.SimpleQueue = queue.SimpleQueue()
    engine, sent = Unprepared(), []
    run(engine, inbox, sent.append)
    assert engine.added_after == 3
    assert [output.deltas[0].token_ids for output in sent] == [(65, 66), (67,)]
    assert engine.left == 0
