"""Speculation stops at saturation and starts again below it, never without a full window of proof."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.build import DRAFTED, Did, samples, spec

from outrider_operator.api.reasons import SpeculationState
from outrider_operator.api.v1alpha1 import Saturation
from outrider_operator.fleet.policy import Memory
from outrider_operator.fleet.samples import Fleet
from outrider_operator.fleet.saturation import (
    Situation,
    decide,
    disable_at,
    enable_at,
    policy,
    saturating,
)
from outrider_operator.fleet.windows import View

ACTIVE, SUSPENDED, DISABLED = SpeculationState.ACTIVE, SpeculationState.SUSPENDED, SpeculationState.DISABLED
EVEN = {"break_even_concurrency": 8}


def _spec(window=30, **fields):
    saturation = {"disableAtConcurrency": 16, "enableAtConcurrency": 12, "stabilizationWindowSeconds": window}
    return spec({"speculativeDecoding": {"saturation": saturation, **fields}})


def _view(*pods, now=None):
    """Pods by what they did, all up to the same moment."""
    length = max(map(len, pods))
    histories = {
        f"pod-{n}": samples(pod, start=5.0 * (length - len(pod))) for n, pod in enumerate(pods) if pod is not None
    }
    return View.of(Fleet(histories), sorted(histories), 5.0 * length if now is None else now)


NOTHING = View.of(Fleet(), [], 0.0)


def _decide(view, served=None, memory=None, scale_out=False):
    served = served or _spec()
    fresh = decide(Memory(), Situation(served, NOTHING, 1.0))
    return decide(memory or fresh, Situation(served, view, 100.0, scale_out, frozenset(view.ready)))


def _suspended(served=None):
    memory = _decide(_view([20] * 6), served)
    assert memory.state is SUSPENDED
    return memory


@pytest.mark.parametrize(
    ("pods", "state"),
    [
        ([[16] * 6], SUSPENDED),
        ([[15.9] * 6], ACTIVE),
        ([[20] * 5], ACTIVE),
        ([[20] * 5 + [15]], ACTIVE),
        ([[15] + [20] * 5], ACTIVE),
        ([[20] * 3 + [None] + [20] * 3], ACTIVE),
        ([[20] * 3 + [None] + [20] * 7], SUSPENDED),
        ([[30] * 6, [2] * 6], SUSPENDED),
        ([[30] * 6, [1] * 6], ACTIVE),
        ([[20] * 6, [None] * 6], SUSPENDED),
        ([[20] * 6, [None] * 6, [None] * 6], ACTIVE),
        ([[20] * 6, [20] * 2], SUSPENDED),
        ([[20] * 6, [0] * 2], ACTIVE),
    ],
    ids=(
        "at the threshold",
        "below it",
        "window not full",
        "fell at last",
        "rose within the window",
        "a gap within it",
        "a gap before it",
        "the mean is at it",
        "the mean is below it",
        "half is measured",
        "less than half is measured",
        "a new pod as busy",
        "a new pod idle",
    ),
)
def test_saturation_is_every_sample_of_the_window_at_the_threshold(pods, state):
    memory = _decide(_view(*pods))
    assert memory.state is state
    assert memory.reason == ("Saturated" if state is SUSPENDED else "")


@pytest.mark.parametrize(
    ("pod", "state"),
    [([12] * 6, ACTIVE), ([12.1] * 6, SUSPENDED), ([20] + [5] * 5, SUSPENDED), ([5, 5, None, 5, 5, 5, 5], SUSPENDED)],
    ids=("at the lower threshold", "above it", "window not over", "a gap"),
)
def test_speculation_resumes_at_the_lower_threshold_after_a_full_window(pod, state):
    assert _decide(_view(pod), memory=_suspended()).state is state


def test_speculation_does_not_resume_while_replicas_are_on_their_way():
    assert _decide(_view([1] * 6), memory=_suspended(), scale_out=True).state is SUSPENDED


def test_a_decision_repeated_is_the_same_and_keeps_its_time():
    memory = _suspended()
    assert memory.since == 100.0
    assert decide(memory, Situation(_spec(), _view([20] * 8), 200.0)) == memory


def test_nothing_is_decided_by_stale_samples():
    assert _decide(_view([20] * 6, now=46.0)).state is ACTIVE
    assert _decide(_view([20] * 6, now=45.0)).state is SUSPENDED


def test_a_window_of_nothing_is_one_sample():
    assert _decide(_view([20]), _spec(window=0)).state is SUSPENDED
    assert _decide(_view([20]), _spec(window=5)).state is SUSPENDED
    assert _decide(_view([20]), _spec(window=6)).state is ACTIVE


@pytest.mark.parametrize("mode", ["Enabled", "Disabled"])
def test_a_fixed_mode_is_not_up_for_decision(mode):
    memory = _decide(_view([99] * 9), _spec(mode=mode))
    assert (memory.state, memory.reason) == ((ACTIVE, "") if mode == "Enabled" else (DISABLED, "DisabledBySpec"))


def test_another_mode_draft_or_tree_starts_over_and_another_threshold_does_not():
    memory = _suspended()

    def after(**fields):
        return decide(memory, Situation(_spec(**fields), NOTHING, 7.0))

    assert after(draft={"uri": "hf://a/b"}).state is ACTIVE
    assert after(mode="Disabled").state is DISABLED
    assert after(window=9, numSpeculativeTokens=2) == memory
    head = {"method": "Eagle", "draft": {"uri": "hf://a/b"}}
    memory = _suspended(_spec(**head))
    assert after(**head) == memory
    assert after(**head, tree={}).state is ACTIVE


@pytest.mark.parametrize(
    ("served", "golden"), [(spec(), "8dffe4ac"), (spec(DRAFTED), "eaae064e")], ids=("smallest", "drafted")
)
def test_a_new_operator_starts_nothing_over(served, golden):
    """The hash is what released operators remember; add rows for new features, change none."""
    assert decide(Memory(), Situation(served, NOTHING, 1.0)).spec_hash == golden


def test_another_threshold_is_what_a_suspension_that_stays_is_told_by():
    memory = _suspended(_spec(saturation={"disableAtConcurrency": 4}))
    after = _decide(_view([14] * 6), _spec(), memory)
    assert (after.state, after.disable_at) == (SUSPENDED, 16)
    assert after.since == memory.since


def test_without_a_threshold_load_suspends_nothing():
    plain = spec()
    assert _decide(_view([999] * 9), plain).state is ACTIVE


def test_the_measured_break_even_is_the_threshold_where_the_spec_has_none():
    plain = spec()
    busy = [Did(running=9, fields=EVEN)] * 6
    memory = _decide(_view(busy), plain)
    assert memory.state is SUSPENDED
    assert memory.disable_at == 8
    assert _decide(_view([Did(running=7, fields=EVEN)] * 6), plain).state is ACTIVE


def test_a_draft_that_pays_for_nobody_is_no_saturation():
    """Suspended at 1 it would resume at 0: a draft that is bad for a while must not be put aside until nobody asks."""
    never = [Did(running=5, fields={"break_even_concurrency": 1})] * 6
    assert _decide(_view(never), spec()).state is ACTIVE


def test_a_measured_threshold_is_frozen_while_suspended_and_read_again_after():
    plain = spec()
    memory = _decide(_view([Did(running=9, fields=EVEN)] * 6), plain)
    calm = [Did(running=6, fields={"break_even_concurrency": 2})] * 6
    resumed = decide(memory, Situation(plain, _view(calm), 200.0))
    assert resumed.state is ACTIVE
    assert disable_at(resumed, plain.speculative_decoding.saturation, _view(calm)) == 2


def test_a_threshold_taken_out_of_the_spec_does_not_suspend_for_ever():
    plain = spec()
    assert decide(_suspended(), Situation(plain, _view([5] * 6), 200.0)).state is ACTIVE


@pytest.mark.parametrize(("threshold", "resume"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 3), (16, 12), (100, 75)])
def test_the_lower_threshold_is_three_quarters_by_default(threshold, resume):
    assert enable_at(threshold, Saturation(disable_at_concurrency=threshold)) == resume


def test_a_given_lower_threshold_is_taken():
    assert enable_at(16, Saturation(disable_at_concurrency=16, enable_at_concurrency=2)) == 2


@pytest.mark.parametrize(
    ("pod", "window", "near"),
    [([20], 30, True), ([20, 15], 30, False), ([20] * 6, 60, True), ([20] * 5, 60, False), ([20] * 20, 3600, False)],
)
def test_saturation_is_near_when_it_would_suspend_within_the_patience(pod, window, near):
    memory = _decide(NOTHING, _spec(window))
    assert saturating(memory, _spec(window).speculative_decoding, _view(pod), 30.0, 1000.0) is near


@pytest.mark.parametrize(("at", "near"), [(110.0, False), (660.0, False), (680.0, True)])
def test_a_suspension_that_has_to_settle_first_is_not_near(at, near):
    measured = spec({"speculativeDecoding": {"saturation": {"stabilizationWindowSeconds": 600}}}).speculative_decoding
    memory = Memory(state=ACTIVE, since=100.0)
    assert saturating(memory, measured, _view([Did(running=20, fields=EVEN)] * 120), 30.0, at) is near


def test_the_policy_says_what_is_remembered():
    speculation = _spec(numSpeculativeTokens=6, minAcceptancePercent=30).speculative_decoding
    told = policy(_suspended(), speculation)
    assert told.to_json() == {
        "revision": told.revision,
        "mode": "Auto",
        "state": "Suspended",
        "reason": "Saturated",
        "numSpeculativeTokens": 6,
        "minAcceptancePercent": 30,
    }
    assert told == told.sealed()


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.none() | st.floats(0, 40), min_size=1, max_size=80),
    st.sampled_from([0, 5, 10, 30, 60]),
)
def test_speculation_never_turns_twice_within_a_window(loads, window):
    served = _spec(window)
    history = samples(loads)
    memory, turns = decide(Memory(), Situation(served, NOTHING, 1.0)), []
    for length in range(2, len(history) + 1):
        seen = history[:length]
        view = View.of(Fleet({"a": seen}), ["a"], seen[-1].at)
        after = decide(memory, Situation(served, view, seen[-1].at))
        if after.state is not memory.state:
            turns.append(seen[-1].at)
            proof = loads[length - 1 - max(1, window // 5) : length - 1]
            assert all(load is not None for load in proof)
            assert all(load >= 15.999 if after.state is SUSPENDED else load <= 12.001 for load in proof)
        memory = after
    assert all(later - earlier >= max(5, window) for earlier, later in pairwise(turns))
