"""How pieces reach a sink: nothing while it is full, a backlog as one, and nothing lost when all ends at once."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.runtime.server.fake_engine import EOS

from outrider_runtime.errors import EngineDead
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.server.generation import Generation, Piece

PARAMS = SamplingParams(max_tokens=100)


class Narrow:
    """Takes one piece at a time; the next when `room` is set."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.room = asyncio.Event()
        self.full = asyncio.Event()

    def take(self, index: int, piece: Piece) -> bool:
        assert not self.full.is_set()
        self.pieces.append(piece)
        self.full.set()
        return False

    async def ready(self) -> None:
        await self.room.wait()
        self.full.clear()


def generation(served, *choices: SamplingParams) -> Generation:
    return Generation(served.service, served.service.model, (5,), choices or (PARAMS,), time.monotonic())


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_full_sink_gets_nothing_until_it_has_room_and_then_all_in_one_piece(served):
    served.engine.script = lambda message: [*[served.ids_of("ab")] * 20, [EOS]]
    sink = Narrow()
    with generation(served) as made:
        running = asyncio.create_task(made.run(sink))
        await until(lambda: not served.service.engine.in_flight)
        first = sink.pieces[0].text
        assert len(sink.pieces) == 1
        assert len(first) < 40
        sink.room.set()
        await running
    assert [piece.finish_reason for piece in sink.pieces] == [None, "stop"]
    assert first + sink.pieces[1].text == "ab" * 20
    assert made.usage.completion_tokens == sum(map(len, served.engine.script(None)))


async def test_an_engine_that_dies_is_told_after_what_it_had_said(served):
    served.engine.script = lambda message: [[70]] * 100_000
    sink = Narrow()
    with generation(served) as made:
        running = asyncio.create_task(made.run(sink))
        (choice,) = made._choices
        await until(lambda: sink.full.is_set() and choice.stream.backlog)
        served.thread.kill()
        await until(served.service.engine.died.done)
        waiting = len(choice.stream.backlog)
        sink.room.set()
        with pytest.raises(EngineDead):
            await running
    assert [len(piece.text) for piece in sink.pieces[1:]] == [waiting * len(served.text_of([70]))]


async def test_a_request_given_up_while_tokens_come_leaves_the_other_streams_alone(served):
    served.engine.script = lambda message: [[70]] * 2_000
    quitters = [generation(served) for _ in range(5)]

    class Leaves(Narrow):
        def take(self, index: int, piece: Piece) -> bool:
            raise ConnectionResetError("the client has gone")

    async def leave(made: Generation) -> None:
        with made:
            await made.run(Leaves())

    class Counts(Narrow):
        def take(self, index: int, piece: Piece) -> bool:
            self.pieces.append(piece)
            return True

    stays = Counts()
    with generation(served) as made:
        tasks = [asyncio.create_task(leave(quitter)) for quitter in quitters]
        for task in tasks[::2]:
            task.cancel()
        async with asyncio.timeout(60):
            await made.run(stays)
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(len(piece.text) for piece in stays.pieces) == len(served.text_of([70] * 2_000))
    assert {type(error) for error in ended} <= {ConnectionResetError, asyncio.CancelledError}
    await until(lambda: served.service.engine.in_flight == 0)
