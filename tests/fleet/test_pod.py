"""The queueing model is one: it serves what it is asked, no faster than its table says, and counts exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet import loads
from tests.fleet.costs import Costs, emitted
from tests.fleet.pod import Pod, Request
from tests.fleet.service import Service

from outrider_operator.fleet.answer import parse_answer
from outrider_runtime.speculation.policy import Policy

PLAIN = Policy(state="Suspended", reason="Saturated")


def test_one_request_takes_what_the_table_says():
    for policy, tokens in ((PLAIN, 0), (Policy(), 4)):
        pod, request = Pod(policy=policy), Request(0.0, 100)
        assert pod.arrive(request)
        pod.advance(100.0)
        assert request.finished == pytest.approx(100 / Costs().rate(1, tokens, 0.7))


def test_drafting_pays_below_its_break_even_and_costs_above_it():
    costs = Costs()
    edge = costs.break_even(4, 0.7)
    assert edge == 20
    assert costs.rate(edge - 1, 4, 0.7) > costs.rate(edge - 1, 0, 0.7)
    assert costs.best(1, 4, 0.7) == 4
    assert costs.best(64, 4, 0.7) == 0
    assert costs.break_even(4, 0.99, most=8) is None
    assert emitted(4, 1.0) == 5


def test_a_full_pod_queues_then_refuses_and_clients_give_up():
    pod = Pod(max_running=1, max_waiting=1, patience=2.0, policy=PLAIN)
    first, second, third = (Request(0.0, 400) for _ in range(3))
    assert [pod.arrive(each) for each in (first, second, third)] == [True, True, False]
    pod.advance(60.0)
    assert first.finished == pytest.approx(400 / Costs().rate(1, 0, 0.7))
    assert second.gave_up == pytest.approx(2.0)
    answer = parse_answer(pod.body())
    assert answer.counters.rejected_requests == 1
    assert answer.counters.waiting_request_seconds == pytest.approx(2.0)


def test_a_policy_takes_effect_from_the_next_step_on():
    pod = Pod()
    pod.arrive(Request(0.0, 10**6))
    pod.advance(10.0)
    drafts = pod.counters["drafts"]
    assert drafts > 0
    pod.put(PLAIN.to_json())
    pod.advance(20.0)
    assert pod.counters["drafts"] == drafts
    assert pod.body()["effective"]["tokens"] == 0


def test_a_pod_that_adapts_is_never_slower_than_one_that_does_not():
    for running in (1, 8, 30, 64):
        fixed, adapting = Pod(), Pod(reflex=True)
        for pod in (fixed, adapting):
            for _ in range(running):
                pod.arrive(Request(0.0, 10**6))
            pod.advance(60.0)
        assert adapting.counters["generated_tokens"] >= fixed.counters["generated_tokens"]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 400)), min_size=1, max_size=60), st.integers(0, 8))
def test_counters_are_the_integrals_of_what_ran_and_waited_however_often_one_looks(arrivals, looks):
    often, once = Pod(max_running=8), Pod(max_running=8)
    now, asked = 0.0, []
    for wait, tokens in arrivals:
        for look in range(looks):
            often.advance(now + wait * look / looks)
        now += wait
        for pod in (often, once):
            pod.advance(now)
        asked.append(Request(now, tokens))
        often.arrive(replace(asked[-1]))
        once.arrive(asked[-1])
    for pod in (often, once):
        pod.advance(now + 500)
    assert often.counters == pytest.approx(once.counters, rel=1e-6, abs=1e-6)
    assert once.running == once.waiting == 0
    ran = sum(r.finished - r.started for r in asked if r.finished is not None)
    waited = sum((r.started if r.started is not None else r.gave_up) - r.arrived for r in asked)
    assert once.counters["running_request_seconds"] == pytest.approx(ran, abs=1e-3)
    assert once.counters["waiting_request_seconds"] == pytest.approx(waited, abs=1e-3)
    assert once.counters["generated_tokens"] == pytest.approx(sum(r.tokens for r in asked if r.finished), rel=1e-3)


def test_the_same_seed_gives_the_same_requests_at_the_rate_of_the_load():
    for make in loads.ALL:
        load = make(seconds=3600.0)
        first, again = list(load.requests()), list(load.requests())
        assert [(r.arrived, r.tokens) for r in first] == [(r.arrived, r.tokens) for r in again]
        expected = sum(load.rate(second) for second in range(3600))
        assert len(first) == pytest.approx(expected, rel=0.05)


def test_a_service_starts_pods_takes_away_those_that_do_not_serve_and_lets_the_others_finish():
    requests = [Request(5.0, 10**3)]
    service = Service(requests, lambda now: Pod(now=now), starts_in=0.0)
    service.scale(1)
    service.starts_in = 60.0
    service.scale(3)
    service.advance(30.0)
    assert list(service.ready) == ["llama-0001"]
    service.scale(2)
    assert sorted(service.places) == ["llama-0001", "llama-0002"]
    service.scale(0)
    service.advance(100.0)
    assert requests[0].finished is not None
    assert service.pod_seconds == 3 * 30


def test_requests_that_find_no_pod_are_turned_away_and_pods_without_room_never_start():
    service = Service([Request(1.0, 10)], lambda now: Pod(now=now), starts_in=0.0, room=1)
    service.scale(0)
    service.advance(2.0)
    assert service.requests[0].started is None
    service.scale(2)
    service.advance(1000.0)
    assert len(service.ready) == 1
