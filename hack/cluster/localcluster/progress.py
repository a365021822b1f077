"""Long steps say what they do and for how long: a line that renews itself on a terminal, now and then one elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

TERMINAL_INTERVAL = 1.0  # seconds between renewals of the line
LOG_INTERVAL = 20.0  # seconds between lines where each one stays


def bar(done: int, total: int, width: int = 24) -> str:
    """'[######..........]  38 %'; a `total` of zero or less draws an empty bar."""
    share = min(1.0, max(0.0, done / total)) if total > 0 else 0.0
    filled = int(share * width)
    return f"[{'#' * filled}{'.' * (width - filled)}] {share:4.0%}"


def elapsed(seconds: float) -> str:
    """'8 s', '2 min 05 s'."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


class Progress:
    """Shows one step. Call `update` as often as you like: it shows what is due."""

    def __init__(self, step: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._step = step
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began = clock()
        self._terminal = self._stream.isatty()
        self._due = self._began + (0 if self._terminal else LOG_INTERVAL)

    def update(self, detail: str) -> None:
        now = self._clock()
        if now < self._due:
            return
        self._due = now + (TERMINAL_INTERVAL if self._terminal else LOG_INTERVAL)
        self._show(f"{self._step}: {detail} ({elapsed(now - self._began)})", last=False)

    def say(self, text: str) -> None:
        """A line that stays, whatever is due."""
        self._show(f"{self._step}: {text}", last=True)

    def done(self, text: str = "done") -> None:
        self._show(f"{self._step}: {text} in {elapsed(self._clock() - self._began)}", last=True)

    def _show(self, line: str, *, last: bool) -> None:
        if self._terminal:
            self._stream.write(f"\r\x1b[K{line}" + ("\n" if last else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
