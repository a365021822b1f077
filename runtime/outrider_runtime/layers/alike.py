"""Layers that launch the same kernels: where programs run only to learn which those are, one of them tells it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

_one_of_each: ContextVar[bool] = ContextVar("one_of_each", default=False)


def alike(layers: nn.ModuleList) -> nn.ModuleList:
    """To be run one behind the other: all of them, or within one_of_each() the first."""
    return layers[:1] if _one_of_each.get() else layers


@contextmanager
def one_of_each() -> Iterator[None]:
    token = _one_of_each.set(True)
    try:
        yield
    finally:
        _one_of_each.reset(token)
