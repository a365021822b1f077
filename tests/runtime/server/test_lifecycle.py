"""The server's life in one process, over a fake engine: loading, serving, draining, dying."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import aiohttp
import pytest
import torch
from tests.runtime.server.fake_engine import READY, EngineThread, FakeEngine

from outrider_runtime import __main__, logs
from outrider_runtime.config import EngineConfig, ServerConfig, SourceConfig
from outrider_runtime.engine.messages import Crashed, Progress, Ready, Refused
from outrider_runtime.errors import EngineDead, Refusal
from outrider_runtime.server.lifecycle import serve

ASK = {"model": "tiny", "prompt": "x", "stream": True}


@dataclass
class Running:
    task: asyncio.Task
    thread: EngineThread
    engine: FakeEngine
    api: str
    admin: str
    http: aiohttp.ClientSession
    ready: Ready

    async def wait_ready(self) -> None:
        async with asyncio.timeout(20):
            while (await self.http.get(f"{self.admin}/readyz")).status != 200:
                await asyncio.sleep(0.01)

    async def stream(self) -> aiohttp.ClientResponse:
        """An endless one, its first event read."""
        response = await self.http.post(f"{self.api}/v1/completions", json=ASK)
        await response.content.readuntil(b"\n\n")
        return response

    async def ended(self) -> None:
        async with asyncio.timeout(20):
            await self.task


@pytest.fixture
async def running(request, tiny_tokenizer_dir) -> AsyncIterator[Running]:
    """serve() with a drain timeout of 0.2 s, or what the test's parameter says; the model is not loaded yet."""
    engine = FakeEngine(script=lambda message: [[70]] * 100_000, step_seconds=0.002)
    thread = EngineThread(engine)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    api, admin = (f"http://127.0.0.1:{s.getsockname()[1]}" for s in sockets)
    config = ServerConfig("tiny", drain_timeout=getattr(request, "param", 0.2))
    task = asyncio.create_task(serve(EngineConfig(SourceConfig("tiny")), config, _Process(thread), sockets))
    ready = replace(READY, tokenizer_path=str(tiny_tokenizer_dir))
    async with aiohttp.ClientSession() as http:
        yield Running(task, thread, engine, api, admin, http, ready)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    thread.join()


class _Process:
    """Stands for client.EngineProcess."""

    def __init__(self, thread: EngineThread) -> None:
        self.channel = thread.channel

    def ending(self) -> str:
        return "was killed by signal 9"

    def stop(self) -> None:
        pass


async def test_past_the_drain_timeout_a_stream_gets_an_error_event_and_the_exit_is_clean(running):
    running.thread.send(running.ready)
    await running.wait_ready()
    stream = await running.stream()
    os.kill(os.getpid(), signal.SIGTERM)
    assert b"shutting down" in (await stream.read()).split(b"\n\n")[-2]
    await running.ended()


@pytest.mark.parametrize("running", [3600], indirect=True)
async def test_a_second_signal_cuts_the_drain_short(running):
    running.thread.send(running.ready)
    await running.wait_ready()
    stream = await running.stream()
    os.kill(os.getpid(), signal.SIGTERM)
    refused = await running.http.post(f"{running.api}/v1/completions", json=ASK)
    assert (refused.status, refused.headers["Connection"]) == (503, "close")
    os.kill(os.getpid(), signal.SIGINT)
    assert b"shutting down" in (await stream.read()).split(b"\n\n")[-2]
    await running.ended()


@pytest.mark.parametrize("running", [3600], indirect=True)
async def test_a_drain_ends_when_the_last_answer_does(running):
    running.engine.script = lambda message: [[70]] * 200
    running.thread.send(running.ready)
    await running.wait_ready()
    stream = await running.stream()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await stream.read()).endswith(b"data: [DONE]\n\n")
    await running.ended()


async def test_an_engine_that_crashes_tells_its_reason_to_streams_and_exit_code(running):
    running.thread.send(running.ready)
    await running.wait_ready()
    stream = await running.stream()
    running.thread.send(Crashed("the engine failed: RuntimeError: no more"))
    assert b"RuntimeError: no more" in (await stream.read()).split(b"\n\n")[-2]
    with pytest.raises(EngineDead, match="no more") as died:
        await running.ended()
    assert died.value.exit_code == 1


@pytest.mark.parametrize(
    ("fault", "words", "exit_code"),
    [
        (RuntimeError("broken"), "the engine failed: RuntimeError: broken", 1),
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), "OutOfMemory: the device ran out of memory in a step", 70),
        (RuntimeError("CUDA error: out of memory"), "OutOfMemory: the device ran out of memory in a step", 70),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), "OutOfMemory: the device ran out of memory in a step", 70),
        (MemoryError(), "OutOfMemory: the device ran out of memory in a step", 70),
    ],
)
async def test_an_engine_whose_step_fails_ends_the_server_with_the_reason_and_its_exit_code(
    running, fault, words, exit_code
):
    running.thread.send(running.ready)
    await running.wait_ready()
    stream = await running.stream()
    running.engine.fault = fault
    assert words.removeprefix("OutOfMemory: ").encode() in (await stream.read()).split(b"\n\n")[-2]
    with pytest.raises(EngineDead) as died:
        await running.ended()
    assert str(died.value).startswith(words)
    assert died.value.exit_code == exit_code


async def test_progress_is_shown_while_loading(running):
    running.thread.send(Progress("3 of 140 GB"))
    async with asyncio.timeout(20):
        while "3 of 140 GB" not in await (await running.http.get(f"{running.admin}/healthz")).text():
            await asyncio.sleep(0.01)


async def test_a_refusal_of_the_engine_is_the_servers(running):
    running.thread.send(Refused("DoesNotFit", "weights 140.0 GB of 72.0 GB; use a larger GPU"))
    with pytest.raises(Refusal, match="DoesNotFit: weights 140"):
        await running.ended()


async def test_an_engine_that_dies_while_loading_is_an_error(running):
    running.thread.kill()
    with pytest.raises(EngineDead, match="signal 9"):
        await running.ended()


async def test_a_folder_without_tokenizer_is_refused(running, tmp_path):
    running.thread.send(replace(READY, tokenizer_path=str(tmp_path)))
    with pytest.raises(Refusal, match="UnsupportedModel"):
        await running.ended()


@pytest.mark.parametrize(
    ("fault", "exit_code", "words"),
    [
        (EngineDead("ran out in a step", "OutOfMemory"), 70, "OutOfMemory: ran out in a step\n"),
        (EngineDead("was killed by signal 9"), 1, "was killed by signal 9\n"),
        (Refusal("DoesNotFit", "too large"), 71, "DoesNotFit: too large\n"),
    ],
)
def test_the_programs_last_words_and_exit_code_say_why(tmp_path, monkeypatch, fault, exit_code, words):
    def fail(parsed):
        raise fault

    monkeypatch.setitem(__main__._COMMANDS, "serve", fail)
    monkeypatch.setattr(logs, "set_up", lambda: None)
    last_words = tmp_path / "termination"
    last_words.touch()
    assert __main__.main(["serve", "--model", "tiny", "--termination-log", str(last_words)]) == exit_code
    assert last_words.read_text() == words
