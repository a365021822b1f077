"""Runs Go with caches of the project's own, and shows what it is at meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass

from .errors import NotBuilt
from .paths import SOURCES, Home

_DOWNLOAD = "go: downloading "
_INTERVAL = 0.5  # seconds between looks at what it is at


def find() -> str:
    """The path of `go`. Raises NotBuilt if there is none."""
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if not found:
        raise NotBuilt(
            "Go is missing: the components are compiled with it; install Go 1.24 or newer and have `go` on PATH"
        )
    return found


@dataclass(frozen=True)
class Go:
    """`show` is called twice a second with what is going on."""

    program: str
    home: Home
    show: Callable[[str], None]

    def query(self, *arguments: str) -> list[str]:
        """The words that `go list` prints; downloads the modules it needs."""

        def state(lines: list[str]) -> str:
            modules = [line.removeprefix(_DOWNLOAD) for line in lines if line.startswith(_DOWNLOAD)]
            return f"downloading modules, {len(modules)} so far, {modules[-1]}" if modules else "reading modules"

        return self._run(["list", *arguments], state)[0].split()

    def build(self, *arguments: str, state: Callable[[int], str]) -> int:
        """Compiles; `state` tells what is going on from the number of packages done, which is returned at the end."""
        _, lines = self._run(["build", "-v", *arguments], lambda lines: state(_compiled(lines)))
        return _compiled(lines)

    def _run(self, arguments: list[str], state: Callable[[list[str]], str]) -> tuple[str, list[str]]:
        # should this process be killed, the compiler must not go on beside the next one
        command = ["setpriv", "--pdeathsig", "TERM", self.program, *arguments]
        # the user's own flags would make another cache key of each package
        settings = {"GOCACHE": str(self.home.go_build), "GOMODCACHE": str(self.home.go_mod), "CGO_ENABLED": "0",
                    "GOFLAGS": "-mod=readonly"}  # fmt: skip
        lines: list[str] = []
        with (
            tempfile.TemporaryFile("w+") as output,
            subprocess.Popen(
                command, cwd=SOURCES, env={**os.environ, **settings}, text=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE,
            ) as process,
        ):  # fmt: skip
            errors = process.stderr
            assert errors
            reader = threading.Thread(target=lambda: lines.extend(map(str.rstrip, errors)), daemon=True)
            reader.start()
            try:
                while process.poll() is None:
                    self.show(state(lines))
                    try:
                        process.wait(_INTERVAL)
                    except subprocess.TimeoutExpired:
                        continue
            except BaseException:
                process.terminate()
                raise
            finally:
                reader.join()
            output.seek(0)
            text = output.read()
        if process.returncode:
            said = [line for line in lines if line and not line.startswith(_DOWNLOAD) and not _is_package(line)]
            raise NotBuilt(f"`go {arguments[0]}` failed: {' / '.join(said[-5:]) or 'it said nothing'}")
        return text, lines


def _is_package(line: str) -> bool:
    """`go build -v` names each package on a line of its own; errors are lines with a colon, a # or a tab."""
    return bool(line) and not line.startswith(("#", "\t")) and ": " not in line


def _compiled(lines: list[str]) -> int:
    return sum(map(_is_package, lines))
