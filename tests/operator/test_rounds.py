from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest
from tests.operator.build import START, answer, spec

from outrider_operator.cache import Key
from outrider_operator.clock import Clock
from outrider_operator.fleet.history import window
from outrider_operator.fleet.samples import Counters, Sample
from outrider_operator.fleet.windows import View
from outrider_operator.observe import Pod
from outrider_operator.rounds import Rounds

LLAMA = Key("team", "llama")


def pod(name: str) -> Pod:
    return Pod(name=name, ip="127.0.0.1", template="t", ready=True, deleting=False, phase="Running")


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


class Reader:
    """Answers for every pod, and counts the rounds."""

    def __init__(self) -> None:
        self.rounds: list[list[str]] = []
        self.hangs = False

    async def __call__(self, pods: Sequence[Pod]) -> Mapping[str, Sample]:
        self.rounds.append([each.name for each in pods])
        if self.hangs:
            await asyncio.Event().wait()
        at = asyncio.get_running_loop().time()
        return {each.name: Sample(at, None, "no answer") for each in pods}


@pytest.fixture
def read() -> Reader:
    return Reader()


async def test_ready_pods_are_read_again_and_again_and_each_round_is_told(read: Reader) -> None:
    measured: list[Key] = []
    rounds = Rounds(read, measured.append, interval=0.001)
    rounds.follow(LLAMA, [pod("a"), pod("b")], keep=60)
    await eventually(lambda: len(measured) >= 3)
    assert read.rounds[0] == ["a", "b"]
    assert set(rounds.fleet(LLAMA).samples) == {"a", "b"}
    assert len(rounds.fleet(LLAMA).samples["a"]) >= 3
    await rounds.close()


async def test_without_ready_pods_nothing_is_read(read: Reader) -> None:
    rounds = Rounds(read, lambda key: None, interval=0.001)
    rounds.follow(LLAMA, [], keep=60)
    await asyncio.sleep(0.01)
    assert read.rounds == []
    assert rounds.fleet(LLAMA).samples == {}


async def test_a_pod_that_is_no_longer_ready_moves_to_the_gone(read: Reader) -> None:
    rounds = Rounds(read, lambda key: None, interval=0.001)
    rounds.follow(LLAMA, [pod("a"), pod("b")], keep=60)
    await eventually(lambda: bool(rounds.fleet(LLAMA).samples))
    rounds.follow(LLAMA, [pod("a")], keep=60)
    await eventually(lambda: set(rounds.fleet(LLAMA).samples) == {"a"})
    assert set(rounds.fleet(LLAMA).gone) == {"b"}
    rounds.follow(LLAMA, [], keep=60)
    assert rounds.fleet(LLAMA).samples == {}
    await rounds.close()


async def test_following_twice_does_not_read_twice_at_once(read: Reader) -> None:
    read.hangs = True
    rounds = Rounds(read, lambda key: None, interval=0.001)
    for _ in range(3):
        rounds.follow(LLAMA, [pod("a")], keep=60)
        await asyncio.sleep(0.005)
    assert len(read.rounds) == 1
    await rounds.close()


async def test_a_forgotten_model_is_read_no_more(read: Reader) -> None:
    rounds = Rounds(read, lambda key: None, interval=0.001)
    rounds.follow(LLAMA, [pod("a")], keep=60)
    await eventually(lambda: len(read.rounds) > 1)
    rounds.forget(LLAMA)
    await asyncio.sleep(0.005)
    before = len(read.rounds)
    await asyncio.sleep(0.01)
    assert len(read.rounds) == before
    assert rounds.fleet(LLAMA).samples == {}


class Idle:
    """Pods over time: a clock that jumps from round to round, and what they say then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks: list[float] = []
        self.ran: set[float] = set()  # rounds in which something ran
        self.reading, self.late = 0.0, 0.0  # seconds that a round of reading takes, and that a sleep takes too long
        self._total, self._until = 0.0, 0.0
        self._end = asyncio.Event()
        clock = Clock(monotonic=lambda: self.now, wall=lambda: START, sleep=self._sleep)
        self.rounds = Rounds(self._read, lambda key: self.looks.append(self.now), 5.0, clock)

    async def until(self, end: float, keep: float = 60) -> None:
        self._until = end
        self.rounds.follow(LLAMA, [pod("a")], keep=keep)
        await asyncio.wait_for(self._end.wait(), 60)
        await self.rounds.close()

    async def _read(self, pods: Sequence[Pod]) -> Mapping[str, Sample]:
        self._total += self.now in self.ran
        counters, at = Counters(self._total, 0, 0, 0, 0, 0, 0, self.now), self.now
        self.now += self.reading
        return {each.name: Sample(at, answer(counters)) for each in pods}

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds + self.late
        if self.now > self._until:
            self._end.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


async def test_where_nothing_happens_for_long_a_model_is_looked_at_once_a_minute() -> None:
    idle = Idle()
    idle.rounds.follow(LLAMA, [pod("a")], keep=60)
    idle.rounds.settled(LLAMA, True)
    await idle.until(600)
    until_every_window_holds_nothing_but_that = [5.0 * n for n in range(16)]
    assert idle.looks == [*until_every_window_holds_nothing_but_that, *(75.0 + 60 * n for n in range(1, 9))]


async def test_a_look_that_changed_something_is_followed_by_another_at_once() -> None:
    idle = Idle()
    idle.rounds.follow(LLAMA, [pod("a")], keep=60)
    await idle.until(300)
    assert idle.looks == [5.0 * n for n in range(61)]


async def test_the_first_request_after_long_is_looked_at_in_its_round() -> None:
    idle = Idle()
    idle.ran = {300.0}
    idle.rounds.follow(LLAMA, [pod("a")], keep=60)
    idle.rounds.settled(LLAMA, True)
    await idle.until(350)
    assert [at for at in idle.looks if at >= 280] == [5.0 * n for n in range(60, 71)]


@pytest.mark.parametrize("seconds", [90, 300, 1801, 3600])
@pytest.mark.parametrize("reading", [0.05, 4.0])
@pytest.mark.parametrize("late", [0.001, 0.02])
async def test_rounds_that_take_long_or_begin_late_still_fill_a_window(
    seconds: int, reading: float, late: float
) -> None:
    idle = Idle()
    idle.reading, idle.late = reading, late
    scaling = {"maxReplicas": 2, "targetConcurrency": 4, "scaleDownWindowSeconds": seconds}
    await idle.until(seconds + 60, keep=window(spec({"autoscaling": scaling})))
    assert View.of(idle.rounds.fleet(LLAMA), ["a"], idle.now).past(seconds) is not None
