"""Where a decoding step's time goes: drafting, verifying, and neither."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from outrider_runtime.engine.engine import Engine
from outrider_runtime.models.causal import CausalLM, Weighted
from outrider_runtime.models.config import ModelConfig

PROGRAMS = {"_draft": "draft", "_extend": "draft", "_forward": "verify", "_sample": "verify"}  # of the runner


@dataclass(frozen=True)
class Parts:
    """Milliseconds of a step."""

    draft: float  # the loop, and what follows the target's step for it
    verify: float  # the target, plain decoding too: forward, sampling, what stands
    gap: float  # in which the device does neither


class _Mark:
    """A moment in the order of the device's work, or of the host's where there is no other device."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._now = time.perf_counter()

    def until(self, other: _Mark) -> float:
        """Milliseconds; only of what is done."""
        if self._event is None:
            return 1e3 * (other._now - self._now)
        return self._event.elapsed_time(other._event)


def time_parts(engine: Engine, steps: int) -> Parts:
    """Over the engine's next steps, in all of which the same requests decode."""
    device = engine._runner.target.device  # benchmarks may
    spans: list[tuple[str, _Mark, _Mark]] = []
    with _marked(engine, device, spans):
        begin = _Mark(device)
        for _ in range(steps):
            engine.step()
        end = _Mark(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    sums = dict.fromkeys(PROGRAMS.values(), 0.0)
    for part, start, stop in spans:
        sums[part] += start.until(stop) / steps
    return Parts(**sums, gap=begin.until(end) / steps - sum(sums.values()))


@contextmanager
def _marked(engine: Engine, device: torch.device, spans: list[tuple[str, _Mark, _Mark]]) -> Iterator[None]:
    runner: Any = engine._runner

    def marked(program: Callable[..., None], part: str) -> Callable[..., None]:
        @wraps(program)
        def run(*given: Any, **named: Any) -> None:
            start = _Mark(device)
            program(*given, **named)
            spans.append((part, start, _Mark(device)))

        return run

    for name, part in PROGRAMS.items():
        setattr(runner, name, marked(getattr(runner, name), part))
    try:
        yield
    finally:
        for name in PROGRAMS:
            delattr(runner, name)  # the class's own again


def bytes_read(target: CausalLM, draft: Weighted | None, passes: int, tokens: int) -> int:
    """What a step cannot do without reading: the weights of the target once and of the draft for each of its passes,
    and, by both, the KV of so many tokens."""
    read = _weights(target) + tokens * _kv_bytes(target.config, target.dtype)
    if draft is not None:
        layers = _kv_bytes(draft.config, draft.dtype) if draft.config.num_layers else 0
        read += passes * (_weights(draft) + tokens * layers)
    return read


def _weights(model: Weighted) -> int:
    """Of an embedding that is not the output layer, too, a few rows are read."""
    embedding = getattr(model, "embedding", None)
    apart = embedding is not None and getattr(model, "head", None) is not embedding
    return sum(weight.nbytes for weight in model.parameters()) - (embedding.weight.nbytes if apart else 0)


def _kv_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
