"""Outrider's runtime: a continuous-batching inference server in torch whose normal case is speculation.

Offline: `from outrider_runtime import Engine, SamplingParams`. Nothing is imported before it is asked for, as the
server's HTTP process does without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider_runtime.offline import Completion, Engine
    from outrider_runtime.sampling.params import SamplingParams

__all__ = ["Completion", "Engine", "SamplingParams"]

_HOMES = {"Completion": "offline", "Engine": "offline", "SamplingParams": "sampling.params"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
