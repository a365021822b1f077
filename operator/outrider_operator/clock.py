"""Time as the operator sees it, in one place, so that a test can let hours pass in seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Clock:
    """`monotonic` is what durations are measured by, `wall` what is written down; `sleep` takes seconds of both."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


REAL = Clock()


def written(moment: datetime) -> str:
    """UTC as the API server writes times in objects; they sort as strings."""
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
