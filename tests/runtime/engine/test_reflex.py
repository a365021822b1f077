"""The reflex in the engine: what it decides is what runs, what it learns is what was, and texts know nothing of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.runtime.engine.driver import SUSPENDED, Collector, assert_all_free, make_engine, naive, run
from tests.runtime.engine.test_capture import EagerGraphs
from tests.runtime.heads import blurred, knowing_eagle, successor_target

from outrider_runtime.engine import runner
from outrider_runtime.engine.capture import Draft
from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.speculation import following
from outrider_runtime.speculation.policy import Policy

AUTO = Policy(num_speculative_tokens=16)
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=16, seed=3, ignore_eos=True)
PROMPTS = [(5,), (6, 7, 8) * 5, tuple(range(4, 44)), (11, 12, 13, 14, 15) * 5]


def requests(*kinds: SamplingParams) -> list[AddRequest]:
    return [
        AddRequest(f"{kind}-{index}", prompt, params)
        for kind, params in enumerate(kinds)
        for index, prompt in enumerate(PROMPTS)
    ]


def assert_exact(collector: Collector, asked: list[AddRequest]) -> None:
    for request in asked:
        assert collector.text(request.request_id) == naive(request.prompt, request.params), request


@pytest.mark.parametrize("setting", [{}, {"blocks": 26, "concurrency": 4}], ids=["room", "preemption"])
@pytest.mark.parametrize("overlap", [True, False], ids=["one step behind", "in turn"])
@pytest.mark.parametrize("method", ["worse draft", "n-gram"])
def test_lengths_that_change_at_every_step_and_by_request_do_not_show_in_the_text(method, overlap, setting):
    engine = make_engine(method, k=6, overlap=overlap, **setting)
    adaptive, lots, seen = engine._reflex.adaptive, np.random.default_rng(0), set()

    def decide(decoding, prompt_tokens, now, arriving):
        adaptive._follows = method == "worse draft" and lots.random() < 0.5
        reads = np.where(lots.random(len(decoding.slots)) < 0.5, lots.integers(0, decoding.missed + 1), decoding.missed)
        reads = np.clip(adaptive._most_reads(prompt_tokens) - (np.cumsum(reads) - reads), 0, reads)
        lengths = lots.integers(0, decoding.caps + 1)
        decision = adaptive._decision(decoding, lengths, reads, prompt_tokens)
        seen.add(tuple(decision.lengths.tolist()))
        return decision

    adaptive.decide = decide
    asked = requests(GREEDY, SEEDED)
    assert_exact(run(engine, asked), asked)
    assert len(seen) > 8
    assert engine.stats().drafts > 10
    assert_all_free(engine)


class Machine:
    """Steps take what they would on some device; `seconds` is its clock. `free_tokens`: that weights' bytes pay for."""

    def __init__(self, method: str, free_tokens: int = 64, **setting) -> None:
        self.free_tokens, self.seconds = free_tokens, 100.0
        self.engine: Engine = make_engine(method, clock=lambda: self.seconds, **setting)
        self.turns: list[int] = []  # of each step's draft loop
        runner = self.engine._runner
        launch = runner.launch
        runner.measure = lambda shape: self.cost(shape.tokens, shape.draft_requests, shape.draft_length)

        def timed(chunks, updates, *, turns, reads, **more):
            drafting = sum(chunk.draft_length > 0 for chunk in chunks)
            ticket = launch(chunks, updates, turns=turns, reads=reads, **more)
            tokens = sum(chunk.length + chunk.draft_length for chunk in ticket.chunks)
            self.seconds += self.cost(tokens, drafting, turns, sum(read.length for read in reads))
            self.turns.append(turns)
            return ticket

        runner.launch = timed
        self.engine.capture(print)
        self._added = 0

    def cost(self, tokens: int, drafting: int, turns: int, reads: int = 0) -> float:
        per_turn = 0.002 * max(1.0, drafting / self.free_tokens)
        return 0.01 * max(1.0, tokens / self.free_tokens) + turns * per_turn + (reads > 0) * 0.002

    def serve(self, running: int, steps: int, params: SamplingParams = GREEDY) -> list[int]:
        """So many steps with so many requests, new ones in place of those that end; the turns of each step."""
        first = len(self.turns)
        for _ in range(steps):
            stats = self.engine.stats()
            for _ in range(running - stats.running - stats.waiting):
                self._added += 1
                self.engine.add(AddRequest(str(self._added), (5, 6, 7, self._added % 50 + 4), params))
            self.engine.step()
        return self.turns[first:]


LONG = replace(GREEDY, max_tokens=40)


@pytest.mark.parametrize("overlap", [True, False], ids=["one step behind", "in turn"])
def test_drafting_stops_where_it_does_not_pay_and_comes_back_where_it_does(overlap):
    machine = Machine("worse draft", free_tokens=4, policy=AUTO, overlap=overlap, blocks=200)
    machine.serve(1, 20, LONG)
    alone = machine.serve(1, 20, LONG)
    assert np.mean(alone) > 1.5
    assert machine.engine.stats().effective_tokens > 1.5
    before = machine.engine.stats().speedup
    machine.serve(8, 30, LONG)
    crowd = machine.serve(8, 30, LONG)
    assert np.mean(crowd) < 0.2  # a probe
    assert machine.engine.stats().speedup < before - 0.1
    assert 1 < machine.engine.stats().break_even_concurrency <= 8
    machine.serve(1, 50, LONG)
    assert np.mean(machine.serve(1, 20, LONG)) > 1.5


def test_where_drafting_does_not_pay_a_head_runs_for_looks_at_new_requests_alone_until_it_does(monkeypatch):
    for name, seconds in (("PAUSE_SECONDS", 0.2), ("LOOK_SECONDS", 0.2), ("LOOK_EVERY", 1.0)):
        monkeypatch.setattr(following, name, seconds)
    model = successor_target()
    head = blurred(knowing_eagle(3, model), 0.1)
    machine = Machine("EAGLE-3", free_tokens=4, policy=AUTO, blocks=200, target=model, draft=head)
    followed: list[float] = []
    extend = machine.engine._runner._extend

    def noted(*arguments, **more):
        followed.append(machine.seconds)
        extend(*arguments, **more)

    machine.engine._runner._extend = noted
    machine.serve(1, 30, LONG)
    assert np.mean(machine.serve(1, 20, LONG)) > 0.5
    machine.serve(8, 40, LONG)
    followed.clear()
    crowd = machine.serve(8, 200, LONG)
    assert 0 < sum(turns > 0 for turns in crowd) < 10  # probes, while it looks
    assert len(followed) < 50
    assert max(np.diff(followed)) > 1.0
    machine.serve(1, 60, LONG)
    assert np.mean(machine.serve(1, 20, LONG)) > 0.5


@pytest.mark.parametrize(("speculative", "most"), [(0, 0), (1, 1), (9, 4), (None, 4)])
def test_a_requests_own_wish_only_lowers_what_the_reflex_would_draft(speculative, most):
    machine = Machine("equal draft", policy=AUTO)
    asked = AddRequest("it", PROMPTS[1], replace(GREEDY, speculative=speculative))
    collector = run(machine.engine, [asked])
    assert max(delta.drafted for delta in collector.deltas["it"]) == most
    assert collector.text("it") == naive(asked.prompt, GREEDY)


def test_requests_that_want_no_drafts_say_nothing_of_the_speed_up():
    machine = Machine("equal draft", policy=AUTO)
    machine.serve(1, 60, replace(LONG, speculative=0))
    assert machine.engine.stats().speedup is None
    machine.serve(1, 60, LONG)
    assert machine.engine.stats().speedup > 1.2


@pytest.mark.parametrize("stop", [SUSPENDED, Policy(mode="Disabled")], ids=["suspended", "disabled"])
def test_a_policy_is_in_force_from_the_next_launch_on_and_drops_nothing(stop):
    machine = Machine("equal draft", policy=AUTO, overlap=True)
    asked, collector = requests(GREEDY), Collector()
    for request in asked:
        machine.engine.add(request)
    for _ in range(4):
        collector.take(machine.engine.step().deltas)
    assert machine.turns[-1] > 0
    machine.engine.set_policy(stop)
    assert machine.engine.stats().effective_tokens == 0
    for _ in range(3):
        collector.take(machine.engine.step().deltas)
    assert machine.turns[-3:] == [0, 0, 0]
    machine.engine.set_policy(replace(AUTO, num_speculative_tokens=2))
    run(machine.engine, [], collector)
    assert set(machine.turns[7:]) <= {0, 1, 2}
    assert_exact(collector, asked)


@pytest.mark.parametrize("overlap", [True, False], ids=["one step behind", "in turn"])
def test_prompts_leave_room_for_drafts_that_a_policy_demands_where_none_paid(overlap):
    policy = replace(AUTO, num_speculative_tokens=4)
    machine = Machine("worse draft", 4, policy=policy, overlap=overlap, concurrency=24, budget=96, blocks=400)
    machine.serve(1, 60, LONG)
    machine.serve(16, 100, LONG)
    machine.seconds += 1.0  # for another look at where it pays
    assert machine.serve(16, 30, LONG).count(0) >= 28  # when all end together, one may be alone for a step, and draft
    long = [AddRequest(f"long {index}", tuple(range(4 + index, 44)) * 2, GREEDY) for index in range(4)]
    for request in long:
        machine.engine.add(request)
    machine.engine.set_policy(replace(policy, mode="Enabled"))
    assert_exact(run(machine.engine, []), long)
    assert max(machine.turns[-30:]) == 4


def test_who_gets_a_slot_is_judged_anew_preempted_ones_too(monkeypatch):
    engine = make_engine("worse draft", blocks=26, concurrency=4, policy=AUTO, prefix_caching=False)
    adaptive, fresh = engine._reflex.adaptive, []
    decide = adaptive.decide

    def watched(decoding, prompt_tokens, now, arriving):
        fresh.extend(adaptive._acceptance._slots[2, slot] == 0 for slot in admitted)
        admitted.clear()
        return decide(decoding, prompt_tokens, now, arriving)

    admitted: list[int] = []
    admit = engine._runner.admit
    monkeypatch.setattr(engine._runner, "admit", lambda request: (admitted.append(request.slot), admit(request)))
    monkeypatch.setattr(adaptive, "decide", watched)
    asked = requests(replace(GREEDY, max_tokens=32), SEEDED)
    run(engine, asked)
    assert len(fresh) > len(asked)  # some came twice
    assert all(fresh)
    assert adaptive._acceptance.trials > 50


@pytest.mark.parametrize("method", ["n-gram", "worse draft"])
def test_while_it_serves_no_draft_loop_is_captured(method, monkeypatch):
    monkeypatch.setattr(runner, "Graphs", EagerGraphs)
    machine = Machine(method, policy=AUTO, k=3, concurrency=5, budget=24)
    graphs = machine.engine._runner._graphs
    before = {key for key in graphs.keys if isinstance(key, Draft)}
    assert {loop.length for loop in before} == {3}
    asked = requests(GREEDY, SEEDED)
    assert_exact(run(machine.engine, asked), asked)
    assert machine.engine.stats().drafts > 0
    assert {key for key in graphs.keys if isinstance(key, Draft)} == before


def test_without_an_idle_moment_loops_are_captured_one_by_one(monkeypatch):
    monkeypatch.setattr(runner, "Graphs", EagerGraphs)
    machine = Machine("n-gram", policy=AUTO, k=3, concurrency=20, budget=96, blocks=200)
    graphs = machine.engine._runner._graphs

    def loops() -> set[Draft]:
        return {key for key in graphs.keys if isinstance(key, Draft)}

    machine.serve(20, 6)  # more than 16, for which a server starts with loops
    assert not any(loop.requests == 20 for loop in loops())
    before = len(loops())
    for _ in range(12):
        machine.seconds += 11.0
        machine.serve(20, 1)
        assert len(loops()) - before <= 1
        before = len(loops())
    assert any(loop.requests == 20 for loop in loops())


class Event:
    """A CUDA event, as far as a ticket asks of it."""

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 7.0


def test_a_step_takes_from_the_end_of_the_one_before_unless_there_was_a_gap():
    engine = make_engine("equal draft", policy=AUTO, overlap=True)

    def step() -> None:
        engine.step()
        engine._flight.ticket.done = Event()

    engine.add(AddRequest("a", PROMPTS[1], GREEDY))
    step()
    assert engine._flight.seconds() is None
    step()
    assert engine._flight.seconds() == pytest.approx(0.007)
    while engine.has_work:
        step()
    engine.add(AddRequest("b", PROMPTS[1], GREEDY))
    step()
    assert engine._flight.seconds() is None
