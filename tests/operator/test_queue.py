from __future__ import annotations

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider_operator.cache import Key
from outrider_operator.queue import Queue

A, B, C = Key("n", "a"), Key("n", "b"), Key("n", "c")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(jitter: float = 1.0) -> tuple[Queue, Clock]:
    clock = Clock()
    return Queue(first_delay=1.0, longest_delay=60.0, clock=clock, jitter=lambda: jitter), clock


def test_a_key_added_twice_is_taken_once() -> None:
    queue, _ = make()
    for key in (A, B, A):
        queue.add(key)
    assert [queue.take(), queue.take(), queue.take()] == [A, B, None]


def test_a_key_added_while_it_is_worked_on_comes_back_after_it_is_done() -> None:
    queue, _ = make()
    queue.add(A)
    assert queue.take() == A
    queue.add(A)
    assert queue.take() is None
    queue.done(A)
    assert queue.take() == A


def test_a_delayed_key_is_taken_when_its_time_has_come() -> None:
    queue, clock = make()
    queue.add_after(A, 5)
    clock.now += 4.9
    assert queue.take() is None
    clock.now += 0.2
    assert queue.take() == A


def test_the_sooner_of_two_delays_counts_and_only_once() -> None:
    queue, clock = make()
    queue.add_after(A, 9)
    queue.add_after(A, 5)
    queue.add_after(A, 7)
    clock.now += 5
    assert queue.take() == A
    queue.done(A)
    clock.now += 10
    assert queue.take() is None


def test_adding_a_delayed_key_now_cancels_its_delay() -> None:
    queue, clock = make()
    queue.add_after(A, 5)
    queue.add(A)
    assert queue.take() == A
    queue.done(A)
    clock.now += 10
    assert queue.take() is None


def test_failures_back_off_exponentially_up_to_the_longest_delay() -> None:
    queue, _ = make()
    assert [queue.retry(A) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_half_of_a_delay_is_jitter() -> None:
    queue, _ = make(jitter=0.0)
    assert [queue.retry(A) for _ in range(3)] == [0.5, 1, 2]


def test_a_success_starts_over() -> None:
    queue, _ = make()
    queue.retry(A)
    queue.retry(A)
    queue.succeeded(A)
    assert queue.retry(A) == 1


def test_the_servers_retry_after_is_a_lower_bound() -> None:
    queue, clock = make()
    assert queue.retry(A, retry_after=30) == 30
    clock.now += 29
    assert queue.take() is None
    clock.now += 1
    assert queue.take() == A


def test_a_forgotten_key_is_neither_planned_nor_remembered() -> None:
    queue, clock = make()
    queue.retry(A)
    queue.forget(A)
    clock.now += 100
    assert queue.take() is None
    assert queue.retry(A) == 1


def test_the_oldest_age_covers_waiting_and_work() -> None:
    queue, clock = make()
    assert queue.oldest() == 0
    queue.add(A)
    clock.now += 3
    queue.add(B)
    assert queue.oldest() == 3
    assert queue.take() == A
    clock.now += 2
    assert queue.oldest() == 2  # B waits since 2 s, and work on A began then
    queue.done(A)
    assert queue.take() == B
    queue.done(B)
    assert queue.oldest() == 0


async def test_waiting_workers_are_woken_for_every_key() -> None:
    queue = Queue()
    workers = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    for key in (A, B, C):
        queue.add(key)
    async with asyncio.timeout(60):
        assert sorted(await asyncio.gather(*workers)) == [A, B, C]


async def test_a_waiting_worker_wakes_for_a_delay_that_ends() -> None:
    queue = Queue()
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add_after(A, 0.01)
    async with asyncio.timeout(60):
        assert await worker == A


class AnyOrder(RuleBasedStateMachine):
    """Whatever the order of calls: one worker a key, nothing added is lost, nothing is taken without being added."""

    keys = st.sampled_from([A, B, C])

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.clock = make()
        self.owed: set[Key] = set()  # added since last taken
        self.later: set[Key] = set()
        self.working: set[Key] = set()

    @rule(key=keys)
    def add(self, key: Key) -> None:
        self.queue.add(key)
        self.owed.add(key)

    @rule(key=keys, seconds=st.floats(0, 50))
    def add_after(self, key: Key, seconds: float) -> None:
        self.queue.add_after(key, seconds)
        self.later.add(key)

    @rule(key=keys)
    def retry(self, key: Key) -> None:
        self.queue.retry(key)
        self.later.add(key)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def take(self) -> None:
        key = self.queue.take()
        if key is None:
            return
        assert key not in self.working
        assert key in self.owed | self.later
        self.working.add(key)
        self.owed.discard(key)
        self.later.discard(key)

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.working)))
        self.queue.done(key)
        self.working.discard(key)

    @invariant()
    def is_never_negative(self) -> None:
        assert self.queue.depth() >= 0

    def teardown(self) -> None:
        for key in sorted(self.working):
            self.queue.done(key)
        self.clock.now += 1000
        taken = set()
        while (key := self.queue.take()) is not None:
            taken.add(key)
            self.queue.done(key)
        assert taken == self.owed | self.later


TestAnyOrder = AnyOrder.TestCase
