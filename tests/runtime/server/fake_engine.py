"""An engine of scripted answers behind the real process loop and the real client, on a thread instead of a process."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider_runtime.engine import process
from outrider_runtime.engine.channel import Channel
from outrider_runtime.engine.messages import (
    AddRequest,
    Crashed,
    DraftState,
    EngineStats,
    LoadedModel,
    Ready,
    StepOutput,
    TokenDelta,
    TokenLogprobs,
)
from outrider_runtime.speculation.policy import Policy

EOS = 1  # of tests/runtime/folders.py
Script = Callable[[AddRequest], Sequence[Sequence[int]]]  # the tokens of each step

READY = Ready(
    tokenizer_path="",
    max_model_len=512,
    vocab_size=288,
    eos_token_ids=(EOS,),
    max_speculative_tokens=4,
    model=LoadedModel("5e2fd8ad6e4a3ce1b1d0a8a9b7a3d7e0c8a1b2c3", 134515008, "Float32"),
    draft=DraftState(ok=True, reason="NotRequired"),
)


@dataclass
class FakeEngine:
    """Steps through each request's script; holds still between steps while `go` is clear."""

    script: Script = lambda message: [[65, 66], [67]]
    base: EngineStats = field(default_factory=EngineStats)
    go: threading.Event = field(default_factory=threading.Event)
    added: list[AddRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    policies: list[Policy] = field(default_factory=list)
    fault: Exception | None = None
    step_seconds: float = 0.0  # how long a step takes
    logprobs: Callable[[int], TokenLogprobs] | None = None  # of a token
    _left: dict[str, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.go.set()

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, message: AddRequest) -> None:
        self.added.append(message)
        steps = [list(step) for step in self.script(message)]
        self._left[message.request_id] = steps

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._left.pop(request_id, None)

    def set_policy(self, policy: Policy) -> None:
        self.policies.append(policy)

    def stats(self) -> EngineStats:
        return replace(self.base, running=self.base.running or len(self._left))

    def idle(self) -> bool:
        return False

    def step(self) -> StepOutput:
        if self.fault is not None:
            raise self.fault
        if not self.go.wait(0.005):
            return StepOutput((), self.stats())
        time.sleep(self.step_seconds)
        deltas = []
        for request_id, steps in list(self._left.items()):
            tokens = steps.pop(0)
            finish = None if steps else "stop" if tokens and tokens[-1] == EOS else "length"
            if not steps:
                del self._left[request_id]
            drafted = 4 if len(tokens) > 1 else 0
            delta = TokenDelta(request_id, tuple(tokens), finish, drafted, max(len(tokens) - 1, 0), cached_tokens=0)
            deltas.append(delta._replace(logprobs=self.logprobs and tuple(map(self.logprobs, tokens))))
        return StepOutput(tuple(deltas), self.stats())


class EngineThread:
    """Runs the engine as process.main() would; `channel` is the client's end, `kill()` closes ours."""

    def __init__(self, engine: process.Stepper, *first: object) -> None:
        ours, self._socket = socket.socketpair()
        self.channel = Channel(ours)
        self._theirs = Channel(self._socket)
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        for message in first:
            self._theirs.send(message)
        self._threads = [
            threading.Thread(target=process.receive, args=(self._theirs, self._inbox), daemon=True),
            threading.Thread(target=self._run, args=(engine,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, engine: process.Stepper) -> None:
        try:
            process.run(engine, self._inbox, self._theirs.send)
        except OSError:
            pass
        except Exception as error:
            fault = process.crash(error)
            self._theirs.send(Crashed(fault.message, fault.reason))
        finally:
            self.kill()

    def send(self, message: object) -> None:
        self._theirs.send(message)

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # wakes who reads on either end
            self._socket.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        self.kill()
        for thread in self._threads:
            thread.join(5)
        self._theirs.close()
