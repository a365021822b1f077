"""A step of the demo: it says what it does, how long it takes, and, should it fail, what to look at."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from localcluster.paths import Home
from localcluster.progress import Progress, elapsed

ROOT = Path(__file__).resolve().parents[2]
HOME = Home.of()
LOGS = HOME.root / "demo"
TAIL = 15  # lines of a failed command's output that are shown

T = TypeVar("T")


class StepError(Exception):
    """A step that could not be done; the message says why."""


class Step:
    """Handed to the body of `step`: runs commands and waits, with progress."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._progress = Progress(name, sys.stdout)

    def say(self, text: str) -> None:
        self._progress.say(text)

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None) -> None:
        """Run a command into a log of its own; raises StepError with the log's end when it fails."""
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"{self.name.replace(' ', '-')}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            while True:
                try:
                    code = process.wait(timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    self._progress.update(_last_line(log) or Path(str(command[0])).name)
                except BaseException:
                    process.terminate()
                    process.wait()
                    raise
        if code:
            end = "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-TAIL:])
            raise StepError(f"`{_shown(command)}` ended with {code}; its last lines, from {log}:\n{end}")

    def wait(self, what: str, look: Callable[[], tuple[T | None, str]], deadline: float) -> T:
        """Call `look` until it gives a value; its second part says how things stand. `deadline` in seconds."""
        end = time.monotonic() + deadline
        while True:
            value, stand = look()
            if value is not None:
                return value
            if time.monotonic() > end:
                raise StepError(f"{what}: not within {elapsed(deadline)}; it stands at: {stand}")
            self._progress.update(stand)
            time.sleep(0.5)

    def done(self, text: str) -> None:
        self._progress.done(text)


@contextmanager
def step(name: str, look_at: Sequence[str]) -> Iterator[Step]:
    """One step. `look_at` are commands that tell more when it fails."""
    try:
        yield Step(name)
    except Exception as error:
        said = str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
        hints = "\n".join(f"    {hint}" for hint in look_at)
        raise SystemExit(f"\n{name} failed: {said}\n  look at:\n{hints}") from error


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return re.sub(r" \([0-9 min]+ s\)$", "", last)[:100]  # this step counts its own time


def _shown(command: Sequence[str | Path]) -> str:
    return " ".join(str(word).removeprefix(f"{ROOT}/") for word in command)
