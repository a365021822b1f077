"""The numbers of status: means of the last minute, and None for what nobody can say."""

from __future__ import annotations

import pytest
from tests.operator.build import Did, samples

from outrider_operator.fleet.report import report
from outrider_operator.fleet.samples import Fleet
from outrider_operator.fleet.windows import View


def _report(*pods):
    histories = {f"pod-{n}": samples(pod) for n, pod in enumerate(pods)}
    return report(View.of(Fleet(histories), sorted(histories), 5.0 * max(map(len, pods))))


def test_running_is_the_mean_of_pods_over_the_last_minute():
    assert _report([100] * 20 + [4] * 12, [2] * 32).running == pytest.approx(3)


def test_acceptance_weighs_pods_by_what_they_drafted():
    found = _report([Did(running=9, acceptance=0.8)] * 12, [Did(running=1, acceptance=0.3)] * 12)
    assert found.acceptance == pytest.approx(0.75)
    assert found.accepted_length == pytest.approx(4.0)


def test_draft_length_is_the_mean_over_all_steps_of_all_requests():
    assert _report([Did()] * 6 + [Did(running=1, length=2)] * 6).effective_tokens == pytest.approx(2)
    assert _report([Did(running=3, length=4)] * 12, [Did(running=1, drafting=False)] * 12).effective_tokens == 3


def test_without_traffic_there_is_nothing_to_say_about_drafting():
    found = _report([0] * 12)
    assert not found.traffic
    assert (found.acceptance, found.accepted_length, found.effective_tokens) == (None, None, None)
    assert found.running == 0


def test_drafting_nothing_is_not_the_same_as_no_traffic():
    found = _report([Did(running=1, drafting=False)] * 12)
    assert found.traffic
    assert found.effective_tokens == 0


def test_speedup_and_break_even_are_the_pods_own():
    one, two = ({"speedup": s, "break_even_concurrency": b} for s, b in ((1.4, 20), (1.8, 30)))
    found = _report([Did(fields=one)], [Did(fields=two)], [Did()])
    assert found.speedup == pytest.approx(1.6)
    assert found.break_even == 20
    assert _report([Did()]).speedup is None


def test_a_pod_that_does_not_draft_says_nothing_of_the_speedup():
    told, drafting = ({"speedup": s, "state": state} for s, state in ((1.0, "Suspended"), (1.8, "Active")))
    assert _report([Did(fields=told)], [Did(fields=drafting)]).speedup == pytest.approx(1.8)


def test_nothing_measured_is_nothing_said():
    found = _report([None] * 12)
    assert found.running is None
    assert found.answers == ()
