"""A measured threshold is not believed for ever: one pod measures it anew, more seldom each time it stays the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.operator.build import Did, samples, spec

from outrider_operator.api.reasons import SpeculationState
from outrider_operator.fleet.breakeven import break_even
from outrider_operator.fleet.policy import Memory
from outrider_operator.fleet.samples import Fleet
from outrider_operator.fleet.saturation import Situation, decide, trial
from outrider_operator.fleet.trial import pause
from outrider_operator.fleet.windows import View

ACTIVE, SUSPENDED = SpeculationState.ACTIVE, SpeculationState.SUSPENDED
NOTHING = View.of(Fleet(), [], 0.0)
PLAIN = spec()
TRIAL = trial(PLAIN.speculative_decoding).revision
WHOLE = 7  # periods that a trial takes, the one in which it is told included


def _pod(running, even, periods=WHOLE, revision=""):
    return [Did(running=running, fields={"break_even_concurrency": even, "revision": revision})] * periods


def _view(*pods):
    histories = {f"pod-{n}": samples(pod) for n, pod in enumerate(pods)}
    return View.of(Fleet(histories), sorted(histories), 5.0 * max(map(len, pods)))


def _decide(view, memory=None, served=PLAIN, at=1000.0, scale_out=False):
    memory = memory or decide(Memory(), Situation(served, NOTHING, 1.0))
    return decide(memory, Situation(served, view, at, scale_out, frozenset(view.ready)))


def _suspended(at=8):
    memory = _decide(_view(_pod(10, at)))
    assert (memory.state, memory.reason, memory.disable_at) == (SUSPENDED, "Saturated", at)
    return memory


def _tried(running, even, memory=None, at=1100.0, pods=WHOLE, drafting=True):
    """What follows when the only pod has been on trial for a while and says this."""
    on_trial = _decide(_view(_pod(running, 8)), memory or _suspended(), at=at)
    assert on_trial.trial == "pod-0"
    shown = [replace(did, drafting=drafting) for did in _pod(running, even, pods, TRIAL)]
    return on_trial, _decide(_view(shown), on_trial, at=at + 35)


def test_the_median_of_two_break_evens_is_the_lower():
    assert break_even(_view(_pod(1, 10), _pod(1, 30), _pod(1, None))) == 10
    assert break_even(_view(_pod(1, None))) is None


def test_pauses_double_up_to_an_hour():
    assert [pause(n) for n in (0, 1, 2, 3, 6, 7, 8, 10**6)] == [60, 60, 120, 240, 1920, 3600, 3600, 3600]


def test_nothing_is_measured_anew_before_the_pause_is_over_and_then_on_the_busiest_pod_alone():
    memory, busy = _suspended(), _view(_pod(9, 8), _pod(12, 8))
    assert memory.remeasure_at == 1060.0
    assert _decide(busy, memory, at=1059.0) == memory
    tried = _decide(busy, memory, at=1060.0)
    assert (tried.trial, tried.state, tried.reason) == ("pod-1", SUSPENDED, "Saturated")
    assert _decide(_view(_pod(20, 8), _pod(9, 8)), tried, at=1065.0) == tried, "a trial stays where it began"


def test_a_threshold_that_rose_far_enough_resumes_speculation_under_the_same_load():
    _, after = _tried(10, 30)
    assert (after.state, after.disable_at, after.trial, after.remeasure_at) == (ACTIVE, 0, "", 0)


def test_a_threshold_that_rose_a_little_is_taken_and_load_has_to_fall_to_it():
    _, after = _tried(10, 12)
    assert (after.state, after.disable_at, after.trial) == (SUSPENDED, 12, "")
    assert _decide(_view(_pod(9, 8)), after, at=1140.0).state is ACTIVE


@pytest.mark.parametrize("even", [8, 5, 1, None], ids=("as before", "lower", "pays for nobody", "unknown"))
def test_what_is_no_better_leaves_the_threshold_and_waits_for_twice_as_long(even):
    _, after = _tried(10, even, drafting=even is not None)
    assert (after.state, after.disable_at, after.remeasured, after.trial) == (SUSPENDED, 8, 1, "")
    assert after.remeasure_at == 1135 + 120
    _, again = _tried(10, even, after, at=1300.0, drafting=even is not None)
    assert (again.remeasured, again.remeasure_at) == (2, 1335 + 240)


def test_drafting_that_pays_at_any_load_is_on_again():
    _, after = _tried(10, None)
    assert (after.state, after.disable_at) == (ACTIVE, 0)


def test_a_trial_shorter_than_its_time_decides_nothing():
    on_trial, after = _tried(10, 30, pods=WHOLE - 2)
    assert after == on_trial


def test_a_pod_that_cannot_be_measured_hands_its_trial_on():
    on_trial, _ = _tried(10, 8)
    silent = [Did(running=10, answered=False)] * WHOLE
    assert _decide(_view(silent, _pod(10, 8)), on_trial, at=1105.0).trial == "pod-1"


def test_nothing_is_measured_anew_while_replicas_are_on_their_way():
    memory = _suspended()
    assert _decide(_view(_pod(10, 8)), memory, at=1100.0, scale_out=True) == memory


def test_a_suspension_soon_after_a_trial_resumed_it_counts_on_and_a_later_one_starts_over():
    resumed = _tried(10, 30)[1]
    full = _view(_pod(10, 8))
    assert _decide(full, resumed, at=1160.0) == resumed, "the other pods have yet to measure theirs"
    soon, late = (_decide(full, resumed, at=at) for at in (1170.0, 1200.0))
    assert (soon.state, soon.remeasured, soon.remeasure_at) == (SUSPENDED, 1, 1170 + 120)
    assert (late.state, late.remeasured, late.remeasure_at) == (SUSPENDED, 0, 1200 + 60)


def test_load_that_falls_ends_a_trial_with_the_suspension():
    on_trial, _ = _tried(10, 8)
    after = _decide(_view(_pod(6, 8)), on_trial, at=1105.0)
    assert (after.state, after.trial, after.remeasure_at) == (ACTIVE, "", 0)


def test_a_threshold_that_the_spec_gives_is_never_tried():
    given = spec({"speculativeDecoding": {"saturation": {"disableAtConcurrency": 4}}})
    full = _view(_pod(10, 99))
    memory = _decide(full, served=given)
    assert (memory.disable_at, memory.remeasure_at) == (4, 0)
    assert _decide(full, memory, given, at=9000.0) == memory
    on_trial, _ = _tried(10, 8)
    assert _decide(full, on_trial, given, at=1105.0).trial == ""


def test_a_threshold_that_was_the_specs_is_measured_a_pause_after_it_was_taken_out():
    given = spec({"speculativeDecoding": {"saturation": {"disableAtConcurrency": 4}}})
    full = _view(_pod(10, None))
    memory = _decide(full, _decide(full, served=given), at=2000.0)
    assert (memory.state, memory.disable_at, memory.remeasure_at) == (SUSPENDED, 4, 2060)


def test_a_clock_that_jumps_back_lengthens_no_pause_beyond_itself():
    assert _decide(_view(_pod(10, 8)), _suspended(), at=5.0).remeasure_at == 65.0


def test_a_trial_survives_the_operator():
    on_trial, _ = _tried(10, 8)
    read = Memory.from_json(on_trial.to_json())
    assert read == on_trial
    assert _decide(NOTHING, read, at=1105.0) == on_trial


def test_a_pause_for_low_acceptance_runs_beside_it():
    floor = spec({"speculativeDecoding": {"minAcceptancePercent": 50}})
    bad = [Did(running=10, acceptance=0.2, fields={"break_even_concurrency": 8})] * 12
    both = _decide(_view(bad), served=floor)
    assert (both.reason, both.disable_at, both.retry_at) == ("Saturated", 8, 1060)
    on_trial = _decide(_view(_pod(10, 8)), both, floor, at=1060.0)
    assert on_trial.trial == "pod-0", "measured anew; the draft is tried once batches are no longer full"
    calm = _decide(_view(_pod(6, 8)), on_trial, floor, at=1065.0)
    assert (calm.reason, calm.trial) == ("LowAcceptance", "")
