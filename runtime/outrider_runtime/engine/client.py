"""The HTTP process's side of the engine: starts its process, sends requests, hands each stream its tokens.

The process is started by command rather than forked, so that this one never imports torch; it loads while the rest of
this one is still being imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import uuid
from collections import deque
from multiprocessing.connection import Connection
from types import TracebackType

from outrider_runtime.config import EngineConfig
from outrider_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    Crashed,
    EngineStats,
    FromEngine,
    PolicyApplied,
    Progress,
    Ready,
    Refused,
    SetPolicy,
    Shutdown,
    StepOutput,
    ToEngine,
    TokenDelta,
)
from outrider_runtime.errors import EngineDead, Refusal, RuntimeFault
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.speculation.policy import Policy

log = logging.getLogger(__name__)

_MESSAGES_PER_WAKE = 64  # then the loop gets to its other work


class EngineProcess:
    """The child, and our end of the pipe to it."""

    def __init__(self, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "outrider_runtime.engine.process", str(theirs.fileno())]
            self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.connection = Connection(ours.detach())
        self.connection.send(config)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ending(self) -> str:
        """How it ended, in words; waits a moment for it to do so."""
        try:
            code = self._child.wait(1)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def stop(self, timeout: float = 5.0) -> None:
        """Wait for it to leave by itself, then make it."""
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


class RequestStream:
    """Tokens of one request, in order. Leaving the context before the end aborts the request in the engine."""

    def __init__(self, client: EngineClient, request_id: str) -> None:
        self.request_id = request_id
        self._client = client
        self._backlog: list[TokenDelta] = []
        self._fault: RuntimeFault | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[TokenDelta]:
        """All deltas since the last call, at least one. Raises the fault that ended the stream (EngineDead, …)."""
        while not self._backlog:
            if self._fault is not None:
                raise self._fault
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._backlog = self._backlog, []
        return deltas

    def push(self, delta: TokenDelta) -> None:
        self._backlog.append(delta)
        self._wake()

    def fail(self, fault: RuntimeFault) -> None:
        self._fault = fault
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.abort(self.request_id)


class EngineClient:
    """One per process, on one event loop. `ready` gives the loaded model or a Refusal; `died` the reason, if it has."""

    def __init__(self, connection: Connection, process: EngineProcess | None = None) -> None:
        self._connection = connection
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, RequestStream] = {}
        self._policies: deque[asyncio.Future[PolicyApplied]] = deque()
        self._closing = False
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.died: asyncio.Future[str] = self._loop.create_future()
        self.stats = EngineStats()
        self.progress = "starting"
        self._loop.add_reader(connection.fileno(), self._read)

    @property
    def in_flight(self) -> int:
        """Requests submitted and not ended, running and waiting."""
        return len(self._open)

    def submit(self, prompt: tuple[int, ...], params: SamplingParams) -> RequestStream:
        """Raises EngineDead."""
        stream = RequestStream(self, uuid.uuid4().hex)
        self._send(AddRequest(stream.request_id, prompt, params))
        self._open[stream.request_id] = stream
        return stream

    def abort(self, request_id: str) -> None:
        """Nothing if it has ended."""
        if self._open.pop(request_id, None) is not None and not self.died.done():
            with contextlib.suppress(EngineDead):
                self._send(AbortRequest(request_id))

    def fail_all(self, fault: RuntimeFault) -> None:
        """End every open stream with `fault`."""
        for stream in list(self._open.values()):
            stream.fail(fault)

    async def set_policy(self, policy: Policy) -> PolicyApplied:
        """In force from the next step on. Raises EngineDead."""
        applied: asyncio.Future[PolicyApplied] = self._loop.create_future()
        self._send(SetPolicy(policy))
        self._policies.append(applied)
        return await applied

    async def close(self) -> None:
        """End the engine's process."""
        self._closing = True
        if not self.died.done():
            with contextlib.suppress(EngineDead):
                self._send(Shutdown())
            self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    def _send(self, message: ToEngine) -> None:
        if self.died.done():
            raise EngineDead(self.died.result())
        try:
            self._connection.send(message)
        except OSError as error:
            raise EngineDead(f"the engine's process does not answer: {error}") from error

    def _read(self) -> None:
        try:
            for _ in range(_MESSAGES_PER_WAKE):
                if not self._connection.poll():
                    return
                self._receive(self._connection.recv())
        except (EOFError, OSError):
            self._die("the engine's process " + (self._process.ending() if self._process else "closed its pipe"))

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepOutput(deltas, stats):
                self.stats = stats
                for delta in deltas:
                    self._deliver(delta)
            case PolicyApplied(_, stats):
                self.stats = stats
                applied = self._policies.popleft()
                if not applied.done():
                    applied.set_result(message)
            case Progress(text):
                self.progress = text
                log.info("loading", extra={"progress": text})
            case Ready():
                self.ready.set_result(message)
            case Refused(reason, text):
                self._closing = True
                self.ready.set_exception(Refusal(reason, text))
            case Crashed(text):
                self._die(text)

    def _deliver(self, delta: TokenDelta) -> None:
        stream = self._open.get(delta.request_id)
        if stream is None:  # aborted while the step ran
            return
        if delta.finish_reason is not None:
            del self._open[delta.request_id]
        stream.push(delta)

    def _die(self, reason: str) -> None:
        if self.died.done():
            return
        self._loop.remove_reader(self._connection.fileno())
        self.died.set_result(reason)
        if not self._closing:
            log.error("engine died", extra={"reason": reason, "open_requests": len(self._open)})
        fault = EngineDead(reason)
        self.fail_all(fault)
        self._open.clear()
        for applied in self._policies:
            if not applied.done():
                applied.set_exception(fault)
        if not self.ready.done():
            self.ready.set_exception(fault)
