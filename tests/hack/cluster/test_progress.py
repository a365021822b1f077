"""How long steps show themselves."""

from __future__ import annotations

import io

import pytest
from localcluster.progress import LOG_INTERVAL, Progress, bar, elapsed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("done", "total", "drawn"),
    [
        (0, 10, "[........]   0%"),
        (5, 10, "[####....]  50%"),
        (10, 10, "[########] 100%"),
        (12, 10, "[########] 100%"),
        (-1, 10, "[........]   0%"),
        (3, 0, "[........]   0%"),
    ],
)
def test_a_bar_shows_the_share_and_never_runs_over(done: int, total: int, drawn: str) -> None:
    assert bar(done, total, width=8) == drawn


@pytest.mark.parametrize(("seconds", "text"), [(0.9, "0 s"), (59, "59 s"), (60, "1 min 00 s"), (754, "12 min 34 s")])
def test_elapsed_time_is_in_words(seconds: float, text: str) -> None:
    assert elapsed(seconds) == text


def test_on_a_terminal_one_line_renews_itself_once_a_second() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress("step", stream, clock)
    for _ in range(24):
        progress.update("at it")
        clock.now += 0.125
    assert stream.getvalue().count("\r") == 3
    assert "\n" not in stream.getvalue()
    progress.done()
    assert stream.getvalue().endswith("step: done in 3 s\n")


def test_in_a_log_there_is_a_line_now_and_then_and_none_for_a_short_step() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress("step", stream, clock)
    progress.update("at it")
    assert stream.getvalue() == ""
    for _ in range(10):
        clock.now += LOG_INTERVAL / 2
        progress.update("at it")
    assert stream.getvalue().splitlines()[0] == f"step: at it ({LOG_INTERVAL:.0f} s)"
    assert len(stream.getvalue().splitlines()) == 5
