"""The draft length in force, judged on a simulated engine whose step times and acceptance are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.runtime.speculation.simulated import (
    LENGTHS,
    PROMPT,
    REQUEST_BUCKETS,
    Simulation,
    Step,
    changes,
    make_adaptive,
    make_table,
    rate,
    tokens_per_second,
)

from outrider_runtime.speculation.adaptive import PROBE_SHARE, SOON_PROBE_SHARE, SOON_PROBED, Adaptive, Decoding
from outrider_runtime.speculation.policy import Policy

LOADS = (1, 4, 16, 64, 128, 256)


def best_fixed(steps: list[Step], acceptance: float, model: bool) -> float:
    running = steps[0].running
    context = int(np.mean([step.decision.shape.kv_tokens / running for step in steps]))
    return max(tokens_per_second(running, length, acceptance, model=model, context=context) for length in (0, *LENGTHS))


def decoding(count: int, **columns: int) -> Decoding:
    values = {"contexts": 256, "caps": 16, "missed": 0, "remaining": 200} | columns
    return Decoding(np.arange(count), **{name: np.full(count, value) for name, value in values.items()})


def windows_over_plain(steps: list[Step]) -> float:
    """The worst second, by the tokens that plain decoding would have had in it."""
    worst, first, tokens, plain, seconds = 9.0, 0, 0.0, 0.0, 0.0
    for step in steps:
        tokens, plain, seconds = tokens + step.tokens, plain + step.plain * step.seconds, seconds + step.seconds
        while seconds >= 1.0:
            worst = min(worst, tokens / plain)
            old = steps[first]
            tokens, plain, seconds = tokens - old.tokens, plain - old.plain * old.seconds, seconds - old.seconds
            first += 1
    return worst


# Each load and each acceptance with some of the others: all of them take a minute.
DRAFTS = [
    (True, running, acceptance)
    for running, acceptance in ((1, 0.2), (1, 0.9), (4, 0.7), (16, 0.4), (64, 0.2), (64, 0.9), (128, 0.7), (256, 0.4))
]
LOOKUPS = [(False, running, acceptance) for running, acceptance in ((1, 0.7), (64, 0.2), (256, 0.7))]


@pytest.mark.parametrize(("model", "running", "acceptance"), DRAFTS + LOOKUPS)
def test_it_comes_within_two_percent_of_the_best_fixed_length(model, running, acceptance):
    simulation = Simulation(make_adaptive(model=model), model=model)
    simulation.run(2.0 if running == 1 else 1.0, running, acceptance)
    steps = simulation.run(0.8, running, acceptance)
    assert rate(steps) >= 0.98 * best_fixed(steps, acceptance, model)


@pytest.mark.parametrize(("running", "before", "after"), [(1, 0.2, 0.9), (1, 0.7, 0.4), (64, 0.2, 0.9), (64, 0.9, 0.2)])
def test_a_change_of_acceptance_moves_the_length_within_two_seconds(running, before, after):
    simulation = Simulation(make_adaptive())
    simulation.run(1.5, running, before)
    moving = simulation.run(2.0, running, after)
    settled = simulation.run(0.7, running, after)
    assert rate(settled) >= 0.97 * best_fixed(settled, after, True)
    assert windows_over_plain(moving) >= 0.93


def test_lookups_at_full_load_come_back_within_two_seconds_of_a_change():
    simulation = Simulation(make_adaptive(model=False), model=False)
    off = simulation.run(1.5, 256, 0.2)
    assert off[-1].decision.turns == 0
    simulation.run(2.0, 256, 0.9)
    settled = simulation.run(0.5, 256, 0.9)
    assert rate(settled) >= 0.97 * best_fixed(settled, 0.9, False)


@pytest.mark.parametrize(("acceptance", "prompts"), [(0.4, False), (0.8, True)])
def test_no_second_of_a_ramp_falls_below_plain_decoding_by_more_than_a_twentieth(acceptance, prompts):
    simulation = Simulation(make_adaptive(), prompts=prompts)
    simulation.run(1.0, 1, acceptance)
    for running in (4, 16, 64, 128, 256, 128, 64, 16, 4, 1):
        simulation.run(0.5, running, acceptance)
    assert windows_over_plain(simulation.steps) >= 0.95


@pytest.mark.parametrize(("running", "arriving"), [(16, 48), (64, 192), (1, 3)])
def test_no_second_of_a_burst_of_prompts_falls_below_plain_decoding(running, arriving):
    written = []
    for policy in (Policy(mode="Disabled"), Policy(num_speculative_tokens=8)):
        simulation = Simulation(make_adaptive(policy=policy))
        simulation.run(1.0, running, 0.7)
        begin = simulation.now
        steps = simulation.burst(2.0, arriving, 0.7)
        ends = np.array([step.at - begin for step in steps])
        tokens = np.cumsum([step.tokens for step in steps])
        begins = np.arange(0.0, 1.0, 0.1)
        written.append(np.interp(begins + 1.0, ends, tokens) - np.interp(begins, ends, tokens, left=0.0))
    assert (written[1] >= 0.95 * written[0]).all()


@pytest.mark.parametrize(("before", "share"), [(1.5, SOON_PROBE_SHARE), (1.5 + SOON_PROBED, PROBE_SHARE)])
def test_while_nothing_pays_only_small_probes_run(before, share):
    simulation = Simulation(make_adaptive(), noise=0.0)
    simulation.run(before, 256, 0.2)
    steps = simulation.run(3.0, 256, 0.2)
    probes = [step for step in steps if step.decision.turns or step.decision.reads.any()]
    assert 4 <= len(probes) < 0.1 * len(steps)
    assert all((step.lengths > 0).sum() <= 4 for step in probes)
    plain = np.median([step.seconds for step in steps if step not in probes])
    added = sum(step.seconds - plain for step in probes)
    assert added <= (share + 0.002) * sum(step.seconds for step in steps)  # contexts wander by a little
    assert all(step.decision.shape.draft_reads == 0 for step in steps if step not in probes)


@pytest.mark.parametrize("seed", range(3))
def test_long_texts_that_draft_again_after_a_while_do_so_within_two_seconds(seed):
    """They have missed so much that a probe costs as much as a step."""
    simulation = Simulation(make_adaptive(), seed=seed, noise=0.005, output=4096)
    simulation.run(2.0, 16, 0.7)
    simulation.run(3.0, 16, 0.2)
    simulation.run(2.0, 16, 0.9)
    steps = simulation.run(1.0, 16, 0.9)
    assert rate(steps) >= 0.95 * best_fixed(steps, 0.9, True)


@pytest.mark.parametrize("seed", [1, 2, 5, 7, 50])
def test_whatever_was_before_the_length_is_right_after_a_few_seconds(seed):
    """Of many such histories, these two (5, 50) once ended with a length in force for which nobody was ready."""
    lots = np.random.default_rng(seed)
    model, output = bool(lots.integers(2)), int(lots.choice([96, 384, 2048, 8192]))
    simulation = Simulation(make_adaptive(model=model), model=model, seed=seed, noise=0.005, output=output)
    for _ in range(4):
        running = int(lots.choice([1, 2, 5, 16, 40, 64, 120, 256]))
        acceptance = float(lots.choice([0.05, 0.2, 0.4, 0.6, 0.8, 0.95]))
        simulation.run(float(lots.choice([0.3, 1, 3])), running, acceptance)
    simulation.run(2.5, running, acceptance)
    steps = simulation.run(1.0, running, acceptance)
    assert rate(steps) >= 0.92 * best_fixed(steps, acceptance, model)


@pytest.mark.parametrize(("acceptance", "running"), [(0.3, 120), (0.2, 56), (0.5, 120)])
def test_what_prompts_take_makes_no_draft_worth_more(acceptance, running):
    """They are read in any case, sooner or later; beside them a draft is not free, as it may be in a step of few."""
    adaptive, plain = (
        Simulation(make_adaptive(model=False, policy=policy), model=False, noise=0.005, output=PROMPT)
        for policy in (Policy(num_speculative_tokens=8), Policy(mode="Disabled"))
    )
    for simulation in (adaptive, plain):
        simulation.busy(1.0, running, acceptance)
    assert rate(adaptive.busy(2.0, running, acceptance)) >= 0.98 * rate(plain.busy(2.0, running, acceptance))


def test_prompts_are_read_by_no_draft_that_drafts_nothing():
    simulation = Simulation(make_adaptive(), output=PROMPT)
    simulation.busy(1.0, 120, 0.4)
    steps = simulation.busy(1.0, 120, 0.4)
    assert sum(step.decision.shape.prompt_tokens for step in steps) > 10_000
    assert not any(step.decision.follows for step in steps)


def test_where_drafting_gains_a_little_for_many_it_is_not_given_up_for_fewer_for_whom_it_does_not():
    """Padding makes gains a staircase: at 5 requests there is none of 3 %, at 30 one of 7."""
    adaptive = make_adaptive()
    simulation = Simulation(adaptive, seed=5084, noise=0.005, output=512)
    simulation.busy(1.0, 30, 0.3)
    steps = simulation.busy(3.0, 30, 0.3)
    assert np.mean([step.decision.turns > 0 for step in steps]) > 0.9
    assert all(step.decision.follows for step in steps)


def test_prompts_leave_room_for_the_drafts_there_are_and_not_for_the_longest_of_each():
    """Of lookups a few requests find much, and most find nothing."""
    adaptive = make_adaptive(model=False)
    simulation = Simulation(adaptive, model=False)
    simulation.run(4.0, 192, np.repeat([0.9, 0.02], [24, 168]))
    drafts = np.mean([step.lengths.mean() for step in simulation.steps[-50:]])
    assert adaptive.expected < drafts + 0.5 < 2.0


def test_equals_do_not_take_turns():
    simulation = Simulation(make_adaptive(), seed=3)
    simulation.run(1.5, 16, 0.4)  # where one token gains 1 % over none
    assert changes(simulation.run(2.0, 16, 0.4)) <= 3


def test_requests_that_are_seldom_right_draft_little_while_others_go_on():
    chances = np.where(np.arange(64) % 2, 0.9, 0.1)
    simulation = Simulation(make_adaptive())
    simulation.run(1.5, 64, chances)
    steps = simulation.run(1.5, 64, chances)
    good, bad = (np.mean([step.lengths[kind::2].mean() for step in steps]) for kind in (1, 0))
    assert good >= 2.0
    assert bad <= 0.5 * good
    fixed = max(
        0.5 * (tokens_per_second(64, length, 0.9) + tokens_per_second(64, length, 0.1)) for length in (0, *LENGTHS)
    )
    assert rate(steps) >= 1.02 * fixed


def test_stalls_and_idle_gaps_change_nothing():
    simulation = Simulation(make_adaptive(), stall=lambda now: 0.3 if int(now / 0.5) != int((now - 0.007) / 0.5) else 0)
    simulation.run(1.5, 4, 0.7)
    simulation.now += 500.0
    simulation.run(1.0, 4, 0.7)
    steps = simulation.run(1.0, 4, 0.7)
    assert rate(steps) >= 0.97 * best_fixed(steps, 0.7, True)


@pytest.mark.parametrize("seconds", [0.003, 0.04])
@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_a_few_slow_steps_in_a_row_cost_little_more_than_themselves(steps, seconds):
    slow = iter([seconds] * steps)
    simulation = Simulation(make_adaptive(), stall=lambda now: next(slow, 0.0) if now > 101.5 else 0.0)
    simulation.run(1.5, 4, 0.7)
    after = simulation.run(1.0 + steps * seconds, 4, 0.7)
    assert rate(after) >= 0.88 * best_fixed(after, 0.7, True)  # in the worst second; the next is as before


@pytest.mark.parametrize(
    ("model", "running", "slowness"),
    [(True, 64, 4.0), (True, 16, 1.5), (True, 4, 2.0), (False, 64, 2.0), (True, 16, 0.6)],
)
def test_a_machine_that_changes_its_pace_goes_on_as_before_after_a_moment(model, running, slowness):
    simulation = Simulation(make_adaptive(model=model), model=model)
    simulation.run(2.0, running, 0.7)
    simulation.slowness = slowness
    simulation.run(1.5 * slowness, running, 0.7)
    steps = simulation.run(3.0, running, 0.7)
    assert rate(steps) >= 0.97 * best_fixed(steps, 0.7, model) / slowness


@pytest.mark.parametrize(
    ("policy", "caps", "lengths"),
    [
        (Policy(state="Suspended"), 16, 0),
        (Policy(mode="Disabled", state="Disabled"), 16, 0),
        (Policy(mode="Enabled", num_speculative_tokens=3), 16, 3),
        (Policy(mode="Enabled", num_speculative_tokens=5), 16, 5),
        (Policy(mode="Enabled", num_speculative_tokens=16), 16, 8),
        (Policy(mode="Enabled", num_speculative_tokens=8), 2, 2),
    ],
)
def test_the_policy_and_the_request_cap_the_length(policy, caps, lengths):
    decision = make_adaptive(policy=policy).decide(decoding(4, caps=caps), 0, 1.0)
    assert decision.lengths.tolist() == [lengths] * 4
    loop = min(length for length in (0, *LENGTHS) if length >= lengths)
    assert (decision.turns, decision.shape.tokens) == (loop, 4 * (1 + lengths))


def test_before_times_are_known_the_policys_length_is_drafted():
    adaptive = Adaptive(make_table(fit=False), Policy(num_speculative_tokens=4), max_concurrency=8)
    assert adaptive.decide(decoding(4), 0, 1.0).lengths.tolist() == [4] * 4
    assert adaptive.break_even(256, 1.0) is None
    assert adaptive.speedup() is None


def test_a_suspended_policy_reads_no_prompts_with_the_draft():
    adaptive = make_adaptive(policy=Policy(state="Suspended"))
    assert adaptive.decide(decoding(4), 100, 1.0).shape.draft_reads == 0
    adaptive.policy = Policy()
    assert adaptive.decide(decoding(4), 100, 1.0).shape.draft_reads >= 100


def test_only_captured_loops_are_chosen():
    simulation = Simulation(make_adaptive())
    for length in LENGTHS:
        simulation.adaptive.captured.loops_ready[LENGTHS.index(length), REQUEST_BUCKETS.index(4)] = length in (1, 2)
    steps = simulation.run(1.0, 4, 0.9)
    assert {step.decision.turns for step in steps if step.lengths.any()} <= {1, 2}
    assert np.mean([step.decision.turns for step in steps]) > 1.8


@pytest.mark.parametrize(("remaining", "repaid"), [(200, True), (1, False)])
def test_what_the_draft_missed_is_read_only_where_it_is_repaid(remaining, repaid):
    adaptive = make_adaptive()
    missed = decoding(4, missed=600, remaining=remaining)
    decisions = [adaptive.decide(missed, 0, 1.0 + 0.01 * step) for step in range(100)]
    assert any(decision.reads.any() for decision in decisions) == repaid
    for decision in decisions:
        assert (decision.lengths[decision.reads < 600] == 0).all()


def test_break_even_is_where_in_truth_no_length_gains_three_percent():
    simulation = Simulation(make_adaptive())
    assert simulation.adaptive.break_even(256, 0.0) is None
    simulation.run(1.0, 64, 0.7)
    found = simulation.adaptive.break_even(256, 100.0)
    assert found is not None

    def gain(running: int) -> float:
        return max(tokens_per_second(running, length, 0.7) for length in LENGTHS) / tokens_per_second(running, 0, 0.7)

    assert gain(found) < 1.08
    assert min(gain(running) for running in range(1, found)) > 0.98
    simulation.adaptive.policy = replace(simulation.adaptive.policy, state="Suspended", reason="Saturated")
    assert simulation.adaptive.break_even(256, 102.0) == found


def test_the_speedup_is_what_it_is_in_truth():
    simulation = Simulation(make_adaptive())
    simulation.run(1.5, 16, 0.7)
    steps = simulation.run(0.5, 16, 0.7)
    truth = rate(steps) / np.mean([step.plain for step in steps])
    assert simulation.adaptive.speedup() == pytest.approx(truth, rel=0.06)
    assert simulation.adaptive.effective_tokens == pytest.approx(np.mean(steps[-1].lengths), abs=0.5)


@pytest.mark.parametrize(("running", "acceptance", "gains"), [(4, 0.7, True), (128, 0.7, False), (4, 0.1, False)])
def test_a_fixed_length_has_the_speedup_that_it_has_in_truth(running, acceptance, gains):
    simulation = Simulation(make_adaptive(policy=Policy(mode="Enabled", num_speculative_tokens=4)))
    assert simulation.adaptive.speedup() is None
    simulation.run(1.5, running, acceptance)
    steps = simulation.run(0.5, running, acceptance)
    truth = rate(steps) / np.mean([step.plain for step in steps])
    assert (truth > 1.0) == gains
    assert simulation.adaptive.speedup() == pytest.approx(truth, rel=0.1)


def test_a_speedup_is_said_of_the_policy_in_force_alone():
    simulation = Simulation(make_adaptive())
    simulation.run(1.0, 16, 0.7)
    adaptive, active = simulation.adaptive, simulation.adaptive.policy
    assert adaptive.speedup() > 1.1
    adaptive.policy = replace(active, state="Suspended", reason="Saturated")
    assert adaptive.speedup() is None
    simulation.run(0.5, 16, 0.7)
    assert adaptive.speedup() == 1.0
    adaptive.policy = active
    assert adaptive.speedup() is None
    simulation.run(0.5, 16, 0.7)
    assert adaptive.speedup() > 1.1


def test_drafts_that_were_not_found_are_no_part_of_the_speedup():
    adaptive = make_adaptive(model=False, policy=Policy(mode="Enabled"))
    for step in range(100):
        shape = adaptive.decide(decoding(4), 0, 0.01 * step).shape
        adaptive.observe([], [], [], replace(shape, tokens=4, rows=4), None, 0.01 * step)
    assert adaptive.speedup() == pytest.approx(1.0, abs=0.02)
