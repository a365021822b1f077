"""The HTTP process's side of the engine: starts its process, sends requests, hands each stream its tokens.

The process is started by command rather than forked, so that this one never imports torch; it loads while the rest of
this one is still being imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable

from outrider_runtime.config import EngineConfig
from outrider_runtime.engine.channel import Channel
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


class EngineProcess:
    """The child, and our end of the channel to it."""

    def __init__(self, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "outrider_runtime.engine.process", str(theirs.fileno())]
            self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.channel = Channel(ours)
        self.channel.send(config)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ending(self) -> str:
        """How it ended, in words; waits a moment for it to do so."""
        try:
            code = self._child.wait(1)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        if code == -signal.SIGKILL:  # nobody else here sends it
            return "was killed by signal 9, as the kernel does when the container's memory runs out"
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def stop(self, timeout: float = 5.0) -> None:
        """Wait for it to leave by itself, then make it."""
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


class RequestStream:
    """Tokens of one request, in order. `wake` is called on the loop, once for all that arrived together."""

    def __init__(self, request_id: str, wake: Callable[[], None]) -> None:
        self.request_id = request_id
        self.wake = wake
        self.backlog: list[TokenDelta] = []
        self.fault: RuntimeFault | None = None

    def take(self) -> list[TokenDelta]:
        """All deltas since the last call, perhaps none; with none to come, `fault` may say why."""
        deltas, self.backlog = self.backlog, []
        return deltas


class EngineClient:
    """One per process, on one event loop. `ready` gives the loaded model or a Refusal; `died` the reason, if it has."""

    def __init__(self, channel: Channel, process: EngineProcess | None = None) -> None:
        self._channel = channel
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, RequestStream] = {}
        self._fresh: list[RequestStream] = []  # to be woken
        self._policies: deque[asyncio.Future[PolicyApplied]] = deque()
        self._closing = False
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.died: asyncio.Future[EngineDead] = self._loop.create_future()
        self.stats = EngineStats()
        self.progress = "starting"
        self._loop.add_reader(channel.fileno(), self._read)

    @property
    def in_flight(self) -> int:
        """Requests submitted and not ended, running and waiting."""
        return len(self._open)

    def submit(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, wake: Callable[[], None]
    ) -> RequestStream:
        """Raises EngineDead. Who loses interest before the end calls abort()."""
        stream = RequestStream(request_id, wake)
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
            stream.fault = fault
            stream.wake()

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
            self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    def _send(self, message: ToEngine) -> None:
        if self.died.done():
            raise self.died.result()
        try:
            self._channel.send(message)
        except OSError as error:
            raise EngineDead(f"the engine's process does not answer: {error}") from error

    def _read(self) -> None:
        try:
            for message in self._channel.receive(wait=False):
                self._receive(message)
        except (EOFError, OSError):
            ending = self._process.ending() if self._process else "closed its channel"
            self._die(EngineDead(f"the engine's process {ending}"))
        fresh, self._fresh = self._fresh, []
        for stream in fresh:
            stream.wake()

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
            case Crashed(text, reason):
                self._die(EngineDead(text, reason))

    def _deliver(self, delta: TokenDelta) -> None:
        stream = self._open.get(delta.request_id)
        if stream is None:  # aborted while the step ran
            return
        if delta.finish_reason is not None:
            del self._open[delta.request_id]
        if not stream.backlog:
            self._fresh.append(stream)
        stream.backlog.append(delta)

    def _die(self, fault: EngineDead) -> None:
        if self.died.done():
            return
        self._loop.remove_reader(self._channel.fileno())
        self.died.set_result(fault)
        if not self._closing:
            log.error("engine died", extra={"reason": str(fault), "open_requests": len(self._open)})
        self.fail_all(fault)
        self._open.clear()
        for applied in self._policies:
            if not applied.done():
                applied.set_exception(fault)
        if not self.ready.done():
            self.ready.set_exception(fault)
