"""The engine's process: loads the model, then steps while there is work and sleeps while there is none.

Started as `python -m outrider_runtime.engine.process FD` by client.py, with the configuration as the first message.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from outrider_runtime import logs
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
from outrider_runtime.errors import BadRequest, EngineDead, Refusal
from outrider_runtime.speculation.policy import Policy

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Stepper(Protocol):
    """What the loop needs of engine.Engine."""

    @property
    def has_work(self) -> bool: ...
    def add(self, message: AddRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def set_policy(self, policy: Policy) -> None: ...
    def step(self) -> StepOutput: ...
    def idle(self) -> bool: ...
    def stats(self) -> EngineStats: ...


def run(engine: Stepper, inbox: queue.SimpleQueue[ToEngine], send: Callable[[FromEngine], None]) -> None:
    """Until Shutdown: carry out what has arrived, then one step if there is work, and one message about both. What
    else the engine has to do is done a piece at a time while nothing arrives."""
    unprepared = True
    while True:
        refused: list[TokenDelta] = []
        changed = False
        for message in _arrived(inbox, wait=not (engine.has_work or unprepared)):
            match message:
                case AddRequest():
                    try:
                        engine.add(message)
                    except BadRequest as error:
                        refused.append(TokenDelta(message.request_id, (), "error", error=error.message))
                case AbortRequest(request_id):
                    engine.abort(request_id)
                case SetPolicy(policy):
                    engine.set_policy(policy)
                    send(PolicyApplied(policy, engine.stats()))
                case Shutdown():
                    return
            changed = True
        if engine.has_work:
            output = engine.step()
            send(replace(output, deltas=(*refused, *output.deltas)) if refused else output)
        elif changed:
            send(StepOutput(tuple(refused), engine.stats()))
        else:
            unprepared = engine.idle()


def _arrived(inbox: queue.SimpleQueue[ToEngine], *, wait: bool) -> Iterator[ToEngine]:
    try:
        yield inbox.get(block=wait)
        while True:
            yield inbox.get_nowait()
    except queue.Empty:
        return


def load(config: EngineConfig, report: Callable[[str], None]) -> tuple[Stepper, Ready]:
    """Raises Refusal."""
    report("importing torch")
    import torch  # here, so that a refusal of the configuration needs none of it

    from outrider_runtime.engine.engine import Engine
    from outrider_runtime.models.loader import load as load_models

    try:
        loaded = load_models(config, report)
        engine = Engine.of(config, loaded)
        engine.capture(report)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Refusal(
            "OutOfMemory",
            "the device ran out of memory while loading; "
            "lower engine.memoryUtilizationPercent or engine.maxModelLength",
        ) from error
    return engine, Ready(
        tokenizer_path=str(loaded.tokenizer_path),
        max_model_len=engine.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_speculative_tokens=config.speculation.max_tokens,
        model=loaded.target.loaded,
        draft=loaded.draft_state,
    )


def receive(channel: Channel, inbox: queue.SimpleQueue[ToEngine]) -> None:
    """On a thread of its own, so that the sender never waits for a step. The channel's end means the parent's."""
    try:
        while True:
            for message in channel.receive():
                inbox.put(message)
    except (EOFError, OSError):
        inbox.put(Shutdown())


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def main(fd: int) -> int:
    _die_with_parent()
    for signum in (signal.SIGINT, signal.SIGTERM):  # the parent decides when to end
        signal.signal(signum, signal.SIG_IGN)
    logs.set_up()
    channel = Channel(socket.socket(fileno=fd))
    config: EngineConfig
    config, *early = channel.receive()
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    for message in early:
        inbox.put(message)
    try:
        engine, ready = load(config, lambda message: channel.send(Progress(message)))
        gc.freeze()  # what is there now stays: no need to look through it for garbage in the middle of a step
        channel.send(ready)
        threading.Thread(target=receive, args=(channel, inbox), name="inbox", daemon=True).start()
        run(engine, inbox, channel.send)
    except Refusal as refusal:
        channel.send(Refused(refusal.reason, refusal.message))
        return refusal.exit_code
    except (BrokenPipeError, ConnectionResetError):  # the parent has gone
        return 0
    except Exception as error:
        log.exception("the engine failed")
        fault = crash(error)
        channel.send(Crashed(fault.message, fault.reason))
        return fault.exit_code
    return 0


def crash(error: Exception) -> EngineDead:
    """What to tell of an error that ended the engine."""
    if _out_of_memory(error):
        return EngineDead(
            "the device ran out of memory in a step; lower engine.memoryUtilizationPercent or engine.maxConcurrency",
            "OutOfMemory",
        )
    return EngineDead(f"the engine failed: {type(error).__name__}: {error}")


def _out_of_memory(error: Exception) -> bool:
    """CUDA says so in several ways: torch's allocator by type, the driver and cuBLAS in words alone."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in words or "alloc_failed" in words)


if __name__ == "__main__":
    exit_code = main(int(sys.argv[1]))
    logging.shutdown()
    os._exit(exit_code)  # torch takes seconds to tear down what the kernel frees at once
