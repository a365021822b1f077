"""Who takes part in a step, with how many tokens, in which blocks; and that no block is ever lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_runtime.config import SchedulerConfig
from outrider_runtime.engine.request import Request
from outrider_runtime.engine.scheduler import Chunk, Scheduler
from outrider_runtime.kv.prefix import PrefixCache
from outrider_runtime.sampling.params import SamplingParams

SIZE = 4
MAX_MODEL_LEN = 64


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(
    blocks: int = 64,
    concurrency: int = 4,
    budget: int = 32,
    clock: Clock | None = None,
    followed: bool = False,
    prefix_caching: bool = True,
):
    cache = PrefixCache(blocks, prefix_caching)
    config = SchedulerConfig(max_concurrency=concurrency, max_batched_tokens=budget)
    return Scheduler(config, cache, SIZE, MAX_MODEL_LEN, clock or Clock(), followed), cache


def request(name: str, length: int, max_tokens: int = 30, speculative: int | None = None) -> Request:
    tokens = [random.Random(name).randrange(100) for _ in range(length)]
    return Request(name, length, SamplingParams(max_tokens, speculative=speculative), 0, tokens, arrival=0.0)


def carry_out(scheduler: Scheduler, chunks: list[Chunk], accepted: int = 0) -> None:
    """What the engine does with a step: write KV, append the target's token and accepted drafts, publish."""
    for chunk in chunks:
        own = chunk.request
        samples = chunk.samples
        own.computed = chunk.end
        if samples:
            stands = min(accepted, chunk.draft_length)
            own.tokens += [1] * (stands + 1)
            own.computed += stands
        scheduler.publish(own)


def shape(chunks: list[Chunk]) -> list[tuple[str, int, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.length, chunk.draft_length) for chunk in chunks]


def test_a_prompt_is_read_in_chunks_of_the_budget_then_decoded():
    scheduler, _ = make(budget=8, concurrency=2)
    scheduler.add(request("a", 19))
    steps = []
    for _ in range(5):
        chunks = scheduler.schedule(0)
        steps += shape(chunks)
        carry_out(scheduler, chunks)
    assert steps == [("a", 0, 8, 0), ("a", 8, 8, 0), ("a", 16, 3, 0), ("a", 19, 1, 0), ("a", 20, 1, 0)]


def test_decodes_go_on_beside_a_long_prompt():
    scheduler, _ = make(budget=8)
    short, long = request("short", 2), request("long", 40)
    scheduler.add(short)
    carry_out(scheduler, scheduler.schedule(0))
    scheduler.add(long)
    for _ in range(5):
        chunks = scheduler.schedule(0)
        assert shape(chunks)[0] == ("short", len(short.tokens) - 1, 1, 0)
        assert sum(chunk.length for chunk in chunks) <= 8
        carry_out(scheduler, chunks)
    assert long.computed > 30


def test_drafts_leave_prompts_half_of_the_budget():
    scheduler, _ = make(budget=12)
    for name in ("a", "b"):
        scheduler.add(request(name, 3))
    carry_out(scheduler, scheduler.schedule(0))
    scheduler.add(request("long", 40))
    assert shape(scheduler.schedule(8)) == [("a", 3, 1, 2), ("b", 3, 1, 2), ("long", 0, 6, 0)]


@pytest.mark.parametrize(("expected", "read"), [(None, 12), (8.0, 12), (1.5, 15), (0.25, 17), (0.0, 18)])
def test_prompts_leave_room_for_as_many_drafts_as_are_expected_of_all(expected, read):
    scheduler, _ = make(budget=20)
    for name in ("a", "b"):
        scheduler.add(request(name, 3))
    carry_out(scheduler, scheduler.schedule(0))
    scheduler.add(request("long", 40))
    chunks = scheduler.schedule(3, expected)
    assert [chunk.draft_length for chunk in chunks] == [3, 3, 0]
    assert chunks[-1].length == read


def test_drafts_may_take_the_whole_budget_when_nothing_is_read():
    scheduler, _ = make(budget=12)
    for name in ("a", "b"):
        scheduler.add(request(name, 3))
    carry_out(scheduler, scheduler.schedule(0))
    assert [chunk.draft_length for chunk in scheduler.schedule(8)] == [5, 5]


@pytest.mark.parametrize(
    ("max_tokens", "speculative", "prompt", "drafted"),
    [
        (30, None, 3, 6),
        (30, 2, 3, 2),
        (30, 0, 3, 0),
        (5, None, 3, 3),  # one came with the prompt; the target adds one itself
        (2, None, 3, 0),
        (60, None, MAX_MODEL_LEN - 4, 2),  # the context ends
    ],
)
def test_no_more_is_drafted_than_a_request_can_take(max_tokens, speculative, prompt, drafted):
    scheduler, _ = make(budget=100)
    scheduler.add(request("a", prompt, max_tokens, speculative))
    carry_out(scheduler, scheduler.schedule(6))
    assert [chunk.draft_length for chunk in scheduler.schedule(6)] == [drafted]


def test_first_come_first_served_up_to_the_concurrency():
    scheduler, _ = make(concurrency=2)
    requests = [request(name, 3) for name in "abc"]
    for each in requests:
        scheduler.add(each)
    carry_out(scheduler, scheduler.schedule(0))
    assert [each.request_id for each in scheduler.running] == ["a", "b"]
    scheduler.remove(requests[0])
    scheduler.schedule(0)
    assert [each.request_id for each in scheduler.running] == ["b", "c"]


def test_a_short_request_does_not_overtake_one_that_waits_for_blocks():
    scheduler, _ = make(blocks=16)
    for name, length in (("a", 30), ("big", 40), ("small", 2)):
        scheduler.add(request(name, length))
    scheduler.schedule(0)
    assert [each.request_id for each in scheduler.running] == ["a"]


def test_without_blocks_the_latest_is_preempted_and_comes_back_first():
    scheduler, cache = make(blocks=16, budget=64)
    first, second, third = request("first", 28), request("second", 15, max_tokens=40), request("third", 3)
    for each in (first, second, third):
        scheduler.add(each)
    for _ in range(18):
        carry_out(scheduler, scheduler.schedule(0))
    assert scheduler.running == [first]
    assert list(scheduler.waiting) == [second, third]
    assert second.blocks == []
    scheduler.remove(first)
    carry_out(scheduler, scheduler.schedule(0))
    assert scheduler.running == [second, third]
    assert second.pending == 1  # read again, with what it had generated
    for each in (second, third):
        scheduler.remove(each)
    assert cache.pool.used == 0


def test_drafts_never_preempt():
    scheduler, _ = make(blocks=16, budget=64)
    first, second = request("first", 28, 36), request("second", 28, 36)
    scheduler.add(first)
    scheduler.add(second)
    carry_out(scheduler, scheduler.schedule(8))
    chunks = scheduler.schedule(8)
    assert len(chunks) == 2
    assert max(chunk.draft_length for chunk in chunks) <= 3  # what is left of the block each needs anyway


@pytest.mark.parametrize(("followed", "drafted"), [(False, 2), (True, 0)])
def test_a_draft_that_follows_has_a_place_for_its_entry_whatever_stood_in_the_step_before(followed, drafted):
    scheduler, _ = make(blocks=16, followed=followed, budget=64)
    for name, length in (("it", 23), ("other", 34)):
        scheduler.add(request(name, length))
    carry_out(scheduler, scheduler.schedule(0))
    it = scheduler.running[0]
    it.flight = Chunk(it, 23, 1, draft_length=2, decodes=True, samples=True)  # its text has 25 to 27 tokens then
    chunk = scheduler.schedule(2)[0]
    assert (chunk.request, len(it.blocks) * SIZE, chunk.draft_length) == (it, 28, drafted)


def test_a_shared_prefix_is_taken_over_but_for_the_last_token():
    scheduler, _ = make(budget=64)
    first = request("a", 16)
    scheduler.add(first)
    carry_out(scheduler, scheduler.schedule(0))
    second = Request("again", 16, SamplingParams(9), 0, first.tokens[:16], arrival=0.0)
    scheduler.add(second)
    scheduler.schedule(0)
    assert (second.computed, second.cached_tokens) == (12, 12)
    assert second.blocks[:3] == first.blocks[:3]
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (32, 12)


def again(name: str, first: Request) -> Request:
    return Request(name, len(first.tokens), SamplingParams(9), 0, list(first.tokens), arrival=0.0)


def test_a_prefix_that_is_being_read_is_waited_for_not_read_twice():
    scheduler, _ = make(budget=64)
    first = request("a", 14)
    for each in (first, again("b", first), again("c", first), request("d", 14)):
        scheduler.add(each)
    steps = []
    for _ in range(2):
        chunks = scheduler.schedule(0)
        steps.append(shape(chunks))
        carry_out(scheduler, chunks)
    assert steps == [
        [("a", 0, 14, 0)],
        [("a", 14, 1, 0), ("b", 12, 2, 0), ("c", 12, 2, 0), ("d", 0, 14, 0)],
    ]


def test_a_prefix_that_somebody_gave_up_reading_is_waited_for_no_more():
    scheduler, _ = make(budget=64)
    first = request("a", 14)
    second = again("b", first)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule(0)
    scheduler.remove(first)
    assert shape(scheduler.schedule(0)) == [("b", 0, 14, 0)]


def test_where_no_prefix_is_kept_none_is_waited_for():
    scheduler, _ = make(budget=64, prefix_caching=False)
    first = request("a", 14)
    for each in (first, again("b", first)):
        scheduler.add(each)
    assert shape(scheduler.schedule(0)) == [("a", 0, 14, 0), ("b", 0, 14, 0)]


def test_time_spent_running_and_waiting_is_summed_exactly():
    clock = Clock()
    scheduler, _ = make(concurrency=1, clock=clock)
    a, b = request("a", 3), request("b", 3)
    scheduler.add(a)
    clock.now += 2  # a waits
    scheduler.schedule(0)
    clock.now += 3  # a runs
    scheduler.add(b)
    clock.now += 5  # a runs, b waits
    scheduler.remove(a)
    clock.now += 7  # b waits
    scheduler.schedule(0)
    clock.now += 11  # b runs
    scheduler.account()
    assert (scheduler.running_seconds, scheduler.waiting_seconds) == (3 + 5 + 11, 2 + 5 + 7)


def test_a_budget_below_the_concurrency_is_an_error():
    with pytest.raises(ValueError, match=r"max_batched_tokens \(8\) must be at least max_concurrency \(9\)"):
        make(concurrency=9, budget=8)


@settings(max_examples=150)
@given(
    blocks=st.integers(16, 40),
    budget=st.integers(4, 40),
    concurrency=st.integers(1, 4),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 50), st.integers(1, 30)),
            st.tuples(st.just("step"), st.integers(0, 8), st.integers(0, 8)),
            st.tuples(st.just("remove"), st.integers(0, 9), st.just(0)),
        ),
        max_size=40,
    ),
)
def test_whatever_happens(blocks, budget, concurrency, actions):
    """Budget, concurrency and block tables hold; the oldest always gets on; in the end every block is free."""
    scheduler, cache = make(blocks, concurrency, budget)
    alive: list[Request] = []

    def step(draft_tokens: int, accepted: int) -> None:
        oldest = alive[0] if alive else None
        before = (oldest.computed, len(oldest.tokens)) if oldest else None
        chunks = scheduler.schedule(draft_tokens)
        assert sum(chunk.length + chunk.draft_length for chunk in chunks) <= budget
        assert len(scheduler.running) <= concurrency
        assert len({chunk.request.request_id for chunk in chunks}) == len(chunks)
        assert {chunk.request.request_id for chunk in chunks} <= {each.request_id for each in scheduler.running}
        for chunk in chunks:
            assert chunk.start == chunk.request.computed
            assert chunk.length >= 1
            assert len(chunk.request.blocks) * SIZE >= chunk.end + chunk.draft_length
            assert chunk.draft_length == 0 or chunk.samples
        held = [block for each in scheduler.running for block in each.blocks]
        assert cache.pool.used == len(set(held))
        assert not any(each.blocks for each in scheduler.waiting)
        carry_out(scheduler, chunks, accepted)
        assert bool(chunks) == bool(alive)
        if oldest:
            assert (oldest.computed, len(oldest.tokens)) != before
        for each in [each for each in alive if each.room(MAX_MODEL_LEN) <= 0]:
            scheduler.remove(each)
            alive.remove(each)

    for index, (action, one, other) in enumerate(actions):
        if action == "add":
            alive.append(request(str(index % 3) if one % 2 else str(index), one, other))
            alive[-1].request_id = str(index)
            scheduler.add(alive[-1])
        elif action == "step":
            step(one, other)
        elif alive:
            gone = alive.pop(one % len(alive))
            scheduler.remove(gone)
    for _ in range(3000):
        if not alive:
            break
        step(2, 1)
    assert not alive
    assert cache.pool.used == 0
