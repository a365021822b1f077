"""A draft that is seldom right is put aside, tried again on one pod after a while, and taken back when it is right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.build import Did, counted, sample, samples, spec

from outrider_operator.api.reasons import SpeculationState
from outrider_operator.fleet.policy import Memory
from outrider_operator.fleet.samples import Counters, Fleet
from outrider_operator.fleet.saturation import Situation, decide, trial
from outrider_operator.fleet.windows import View

ACTIVE, SUSPENDED = SpeculationState.ACTIVE, SpeculationState.SUSPENDED
FULL = 12  # periods of the window of a minute
GOOD, BAD, IDLE = Did(running=5, acceptance=0.7), Did(running=5, acceptance=0.2), Did()
NOTHING = View.of(Fleet(), [], 0.0)


def _spec(*parts, floor=50, **fields):
    return spec({"speculativeDecoding": {"minAcceptancePercent": floor, **fields}}, *parts)


TRIALS = {floor: trial(_spec(floor=floor).speculative_decoding).revision for floor in range(101)}
TRIAL = TRIALS[50]
NONE = Counters(0, 0, 0, 0, 0, 0, 0, 0)


def _view(*pods, revision="", start=0.0):
    histories = {}
    for number, pod in enumerate(pods):
        shown = (replace(did, fields={**did.fields, "revision": revision}) if did else None for did in pod)
        histories[f"pod-{number}"] = samples(list(shown), start=start)
    return View.of(Fleet(histories), sorted(histories), start + 5.0 * max(map(len, pods)))


def _decide(view, memory=None, served=None, at=1000.0, current=None):
    served = served or _spec()
    memory = memory or decide(Memory(), Situation(served, NOTHING, 1.0))
    names = frozenset(view.ready) if current is None else frozenset(current)
    return decide(memory, Situation(served, view, at, current=names))


def _paused(served=None):
    memory = _decide(_view([BAD] * FULL), served=served)
    assert (memory.state, memory.reason) == (SUSPENDED, "LowAcceptance")
    return memory


@pytest.mark.parametrize(
    ("pods", "floor", "state"),
    [
        ([[BAD] * FULL], 50, SUSPENDED),
        ([[GOOD] * FULL], 50, ACTIVE),
        ([[BAD] * FULL], 20, ACTIVE),
        ([[BAD] * FULL], None, ACTIVE),
        ([[BAD] * (FULL - 1)], 50, ACTIVE),
        ([[Did(running=4, acceptance=0.2)] * FULL], 50, ACTIVE),
        ([[IDLE] * FULL], 50, ACTIVE),
        ([[BAD] * FULL, [GOOD] * FULL], 50, SUSPENDED),
        ([[BAD] * FULL, [GOOD] * FULL, [GOOD] * FULL], 50, ACTIVE),
        ([[BAD] * FULL, [None] * FULL, [None] * FULL], 50, ACTIVE),
        ([[BAD] * FULL + [GOOD] * FULL], 50, ACTIVE),
    ],
    ids=(
        "too few accepted",
        "enough accepted",
        "at the floor",
        "no floor",
        "the window is not full",
        "too few drafts",
        "no traffic",
        "the mean of all is below",
        "the mean of all is above",
        "most unmeasured",
        "long ago",
    ),
)
def test_speculation_pauses_when_a_minute_of_drafts_is_below_the_floor(pods, floor, state):
    served = _spec(floor=floor)
    memory = _decide(_view(*pods), served=served)
    assert memory.state is state
    assert memory.retry_at == (1060.0 if state is SUSPENDED else 0.0)
    assert _decide(_view(*pods), memory, served) == memory


def test_pods_of_an_earlier_template_are_not_what_is_judged():
    view = _view([GOOD] * FULL, [BAD] * FULL, [BAD] * FULL)
    assert _decide(view, current=["pod-0"]).state is ACTIVE
    assert _decide(view).state is SUSPENDED


def test_what_was_drafted_before_it_was_turned_on_is_not_held_against_it():
    memory = replace(_decide(NOTHING), since=950.0)
    assert _decide(_view([BAD] * FULL), memory).state is ACTIVE
    assert _decide(_view([BAD] * FULL), memory, at=1010.0).state is SUSPENDED
    assert _decide(_view([BAD] * FULL), replace(memory, since=5000.0)).state is SUSPENDED, "a clock that jumped back"


def test_nothing_is_tried_before_the_pause_is_over_and_then_on_the_busiest_pod_alone():
    quiet = _view([IDLE], [Did(running=2)], [Did(running=1)])
    memory = _paused()
    assert _decide(quiet, memory, at=1059.0) == memory
    tried = _decide(quiet, memory, at=1060.0)
    assert tried.trial == "pod-1"
    assert (tried.state, tried.reason) == (SUSPENDED, "LowAcceptance")
    busier = _view([Did(running=9)], [Did(running=1)])
    assert _decide(busier, tried, at=1065.0) == tried, "a trial stays where it began"


@pytest.mark.parametrize(
    "unfit",
    [[None, None, None, None], [Did(running=9, fields={"draft_ok": False})] * 4],
    ids=("unmeasured", "its draft is broken"),
)
def test_a_trial_goes_to_a_pod_that_can_show_something(unfit):
    memory = replace(_decide(_view([GOOD], [GOOD]), _paused(), at=1060.0), trial="pod-0")
    assert _decide(_view(unfit, [IDLE] * 4), memory, at=1065.0).trial == "pod-1"


def test_without_a_pod_to_try_it_on_it_waits():
    broken = Did(running=9, fields={"draft_ok": False})
    memory = _decide(_view([broken]), _paused(), at=1060.0)
    assert (memory.trial, memory.state) == ("", SUSPENDED)


@pytest.mark.parametrize(
    ("trial_pod", "state", "attempts"),
    [
        ([GOOD] * 5, ACTIVE, 0),
        ([BAD] * 5, SUSPENDED, 2),
        ([GOOD] * 4, SUSPENDED, 1),
        ([Did(running=1, acceptance=0.7)] * 7, ACTIVE, 0),
        ([Did(running=1, acceptance=0.2)] * 7, SUSPENDED, 2),
        ([Did(running=1, acceptance=0.2)] * 6, SUSPENDED, 1),
        ([IDLE] * 40, SUSPENDED, 1),
        ([GOOD] * 3 + [None] + [GOOD] * 2, ACTIVE, 0),
        ([Did(running=0.1, acceptance=0.2)] * 20, SUSPENDED, 1),
    ],
    ids=(
        "200 drafts and good",
        "200 drafts and bad",
        "fewer within half a minute",
        "half a minute and good",
        "half a minute and bad",
        "less than half a minute",
        "no traffic",
        "a reading that failed within",
        "too few to prove anything",
    ),
)
def test_a_trial_ends_by_drafts_or_by_time_and_a_quiet_one_goes_on(trial_pod, state, attempts):
    on_trial = _decide(_view([GOOD]), _paused(), at=1060.0)
    memory = _decide(_view(trial_pod, revision=TRIAL), on_trial, at=1200.0)
    assert (memory.state, memory.attempts) == (state, attempts)
    if attempts == 2:
        assert (memory.retry_at, memory.trial) == (1200 + 120, "")
    if attempts == 0:
        assert (memory.retry_at, memory.trial, memory.reason) == (0, "", "")
    if attempts == 1:
        assert memory == on_trial


def test_only_what_was_drafted_under_the_trial_counts():
    on_trial = _decide(_view([GOOD]), _paused(), at=1060.0)
    before = samples([BAD] * 10)
    after = samples([replace(GOOD, fields={"revision": TRIAL})] * 3, start=50.0)
    view = View.of(Fleet({"pod-0": (*before, *after[1:])}), ["pod-0"], 65.0)
    assert _decide(view, on_trial, at=1080.0) == on_trial


def test_a_runtime_that_starts_anew_within_a_trial_starts_the_trial_anew():
    on_trial = _decide(_view([GOOD]), _paused(), at=1060.0)
    shown = {"fields": {"revision": TRIAL}}
    history = samples([replace(GOOD, **shown)] * 4)
    again = samples([replace(GOOD, **shown)] * 2, start=25.0)
    view = View.of(Fleet({"pod-0": (*history, *again)}), ["pod-0"], 35.0)
    assert _decide(view, on_trial, at=1095.0) == on_trial


@pytest.mark.parametrize(
    "change",
    [{"numSpeculativeTokens": 2}, {"floor": 10}, {"floor": None}, {"draft": {"uri": "hf://a/b"}}, {"mode": "Enabled"}],
    ids=("draft length", "floor", "no floor", "draft", "mode"),
)
def test_a_change_of_what_acceptance_depends_on_ends_the_pause(change):
    memory = _decide(_view([BAD]), _paused(), _spec(**change), at=1005.0)
    assert (memory.state, memory.attempts, memory.retry_at, memory.trial) == (ACTIVE, 0, 0, "")
    assert memory.since == 1005.0


def test_another_model_ends_the_pause_and_another_threshold_does_not():
    memory = _paused()
    assert _decide(_view([BAD]), memory, _spec({"model": {"revision": "v2"}}), at=1005.0).state is ACTIVE
    saturation = {"disableAtConcurrency": 90, "stabilizationWindowSeconds": 9}
    assert _decide(_view([BAD]), memory, _spec(saturation=saturation), at=1005.0) == memory


def test_a_clock_that_jumps_back_lengthens_no_pause_beyond_itself():
    assert _decide(_view([IDLE]), _paused(), at=5.0).retry_at == 65.0


SATURATION = {"disableAtConcurrency": 8, "enableAtConcurrency": 6}


def test_saturation_is_the_reason_reported_while_the_pause_runs_on():
    served = _spec(saturation=SATURATION)
    paused = _paused(served)
    busy, calm = _view([Did(running=9)] * 6), _view([Did(running=2)] * 6)
    both = _decide(busy, paused, served, at=1030.0)
    assert (both.state, both.reason, both.retry_at) == (SUSPENDED, "Saturated", paused.retry_at)
    assert _decide(busy, both, served, at=1100.0).trial == "", "nothing is tried while batches are full"
    relieved = _decide(calm, both, served, at=1040.0)
    assert (relieved.reason, relieved.trial) == ("LowAcceptance", "")
    assert _decide(calm, both, served, at=1100.0).reason == "LowAcceptance"
    assert _decide(calm, relieved, served, at=1105.0).trial == "pod-0"


def test_saturation_ends_a_trial_and_it_is_made_up_for_later():
    served = _spec(saturation=SATURATION)
    on_trial = _decide(_view([GOOD]), _paused(served), served, at=1060.0)
    full = _decide(_view([Did(running=9)] * 6), on_trial, served, at=1090.0)
    assert _decide(_view([Did(running=9)] * 6), full, served, at=1095.0).trial == ""
    calm = _decide(_view([Did(running=2)] * 6), full, served, at=1200.0)
    assert _decide(_view([Did(running=2)] * 6), calm, served, at=1205.0).trial == "pod-0"


def test_a_trial_that_passes_into_full_batches_does_not_turn_twice():
    """A measured break-even is not looked at while nothing is drafted; once it is, load decides in the same step."""
    served = _spec()
    on_trial = _decide(_view([GOOD]), _paused(), served, at=1060.0)
    full = replace(GOOD, running=9, fields={"break_even_concurrency": 8})
    memory = _decide(_view([full] * 6, revision=TRIAL), on_trial, served, at=1100.0)
    assert (memory.state, memory.reason, memory.attempts) == (SUSPENDED, "Saturated", 0)


def test_a_pause_survives_the_operator():
    on_trial = _decide(_view([GOOD]), _paused(), at=1060.0)
    read = Memory.from_json(on_trial.to_json())
    assert read == on_trial
    assert _decide(NOTHING, read, at=1065.0) == on_trial


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([GOOD, BAD, IDLE, None]), min_size=1, max_size=80), st.integers(30, 69))
def test_whatever_came_before_a_good_draft_is_on_again_in_the_end(past, floor):
    """The pod does at once as it is told; half an hour of good drafts follows any past."""
    served, total, history, turned = _spec(floor=floor), NONE, (), []
    memory = decide(Memory(), Situation(served, NOTHING, 1.0))
    for number, did in enumerate([*past, *[GOOD] * 360], start=1):
        now = 5.0 * number
        drafting = memory.state is ACTIVE or memory.trial
        fields = {"revision": TRIALS[floor] if drafting else "plain"}
        shown = Did(did.running if did and drafting else 0, acceptance=did.acceptance if did else 0, fields=fields)
        total = counted(total, shown)
        history = (*history, sample(now, total, replace(shown, answered=did is not None)))[-14:]
        view = View.of(Fleet({"a": history}), ["a"], now)
        after = decide(memory, Situation(served, view, 1000 + now, current=frozenset({"a"})))
        if after.state is not memory.state:
            turned.append(now)
        memory = after
    assert (memory.state, memory.attempts) == (ACTIVE, 0)
    assert all(later - earlier >= 60 for earlier, later in pairwise(turned))
