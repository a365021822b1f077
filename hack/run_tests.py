"""Run the tests, all of them or the parts named, and close with one line that sums them up.

Each part has a time budget: it is printed beside what the part took, and a part that takes more than
twice its budget fails even when its tests pass. Making ready what a part needs (the environment, the
cluster's binary, images) is timed and printed too, but is nobody's budget: it is long only once.

Standard library only: this file runs before the development environment exists.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "hack"), str(ROOT / "hack/cluster")]

from demo.cluster import check_space  # noqa: E402  # needs the two folders above
from demo.steps import StepError  # noqa: E402

HOME = Path(os.environ.get("OUTRIDER_HOME", "~/.cache/outrider")).expanduser()
BIN = HOME / "venv/bin"
CLUSTER = ROOT / "hack/cluster/cluster"
DOWN = 3  # what `cluster status` ends with when nothing runs

ENVIRONMENT = {
    "PYTHONPATH": "operator:runtime:hack:hack/cluster",
    "OUTRIDER_REQUIRE_CLUSTER": "1",  # a test that finds no cluster fails, it is not skipped
    "MYPY_CACHE_DIR": str(HOME / "mypy"),  # reading torch's types takes a minute, once for all clones
}
LINTERS = (
    (BIN / "ruff", "check", "."),
    (BIN / "ruff", "format", "--check", "."),
    (BIN / "mypy",),
    (BIN / "lint-imports",),
)


@dataclass(frozen=True)
class Part:
    """One share of the suite. `budget` in seconds; `needs` are commands that run before the clock starts."""

    name: str
    budget: float
    paths: tuple[str, ...] = ()
    marks: str = "not node"  # pytest's -m; soak tests are left out everywhere, gpu ones skip where there is none
    needs: tuple[tuple[str | Path, ...], ...] = ()
    workers: int = 1  # processes that share the tests; more than one only where no test minds what runs beside it


@dataclass(frozen=True)
class Count:
    """Tests by outcome."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


UNIT = ("tests/operator", "tests/fleet", "tests/contract", "tests/hack")
PARTS = (
    Part("lint", 60),
    Part("unit", 120, UNIT, needs=((CLUSTER, "build"),), workers=2),
    Part("runtime", 300, ("tests/runtime", "tests/gpu"), needs=((BIN / "python", "hack/demo_models.py"),), workers=2),
    Part("cluster", 120, ("tests/cluster",), needs=((CLUSTER, "build"),)),
    Part("node", 120, ("tests/hack",), "node", ((CLUSTER, "build"), ("hack/image/packages",))),
    Part("e2e", 240, ("tests/e2e",), "node", ((CLUSTER, "build"), (BIN / "python", "-m", "demo", "prepare"))),
)
BACKGROUND = ((CLUSTER, "packages"), (CLUSTER, "build", "--background"))
IMAGES = ((BIN / "python", "-m", "demo", "images"),)


def main(names: list[str]) -> int:
    if unknown := set(names) - {part.name for part in PARTS}:
        print(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PARTS)}")
        return 2
    parts = [part for part in PARTS if not names or part.name in names]
    wanted = {part.name for part in parts}
    os.environ |= ENVIRONMENT
    try:
        if "e2e" in wanted:
            check_space()
    except StepError as error:
        print(error)
        return 1
    # Minutes of compiling on a new machine: it goes on beside the downloads and image builds.
    if any((CLUSTER, "build") in part.needs for part in parts) and not prepare("cluster", BACKGROUND):
        return 1
    if not prepare("environment", (("hack/venv",),)) or not prepare("images", IMAGES if "e2e" in wanted else ()):
        return 1

    total, lines = Count(), []
    was_up = node_is_up()
    for part in parts:
        count, line = run(part)
        total += count
        lines.append(line)
        print(line, flush=True)
    if node_is_up() and not was_up:
        subprocess.run([CLUSTER, "down"], cwd=ROOT, check=False)
    if len(parts) > 1:
        print("\n" + "\n".join(lines))
    print(total)
    return 1 if total.failed else 0


def run(part: Part) -> tuple[Count, str]:
    """What came of one part, and the line that says so."""
    print(f"\n=== {part.name} ===", flush=True)
    if not prepare(part.name, part.needs):
        return Count(failed=1), f"{part.name:<8} not run: see the command that failed above"
    start = time.monotonic()
    count = pytest(part) if part.paths else lint()
    took = time.monotonic() - start
    late = took > 2 * part.budget
    line = f"{part.name:<8} {took:4.0f} s of {part.budget:.0f} s: {count}"
    return count + Count(failed=int(late)), line + (" and TOO SLOW: over twice its budget" if late else "")


def prepare(name: str, commands: tuple[tuple[str | Path, ...], ...]) -> bool:
    """Run commands until one fails; false then."""
    for command in commands:
        start = time.monotonic()
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            print(f"{name}: {shown(command)} failed", flush=True)
            return False
        if (took := time.monotonic() - start) > 1:
            print(f"{name}: {shown(command)} took {took:.0f} s", flush=True)
    return True


def node_is_up() -> bool:
    """Whether the local cluster runs: one that was up before, the demo's perhaps, is left as it was."""
    return subprocess.run([CLUSTER, "status"], cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode != DOWN


def lint() -> Count:
    outcomes = [subprocess.run(command, cwd=ROOT, check=False).returncode == 0 for command in LINTERS]
    return Count(passed=outcomes.count(True), failed=outcomes.count(False))


def pytest(part: Part) -> Count:
    """Run pytest over the part's folders that exist."""
    paths = [path for path in part.paths if (ROOT / path).is_dir()]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        report = Path(scratch) / "report.xml"
        command = [BIN / "python", "-m", "pytest", "-q", "-m", f"({part.marks}) and not soak", "--junitxml", report]
        environment = dict(os.environ)
        if part.workers > 1:
            # Neighbours stay together, for they share fixtures; who is done early takes over half of what is left.
            command += ["-n", str(part.workers), "--dist", "worksteal"]
            # Each worker's folder is one level deeper, and paths of sockets in them have a limit.
            command += ["--basetemp", Path(scratch) / "t"]
            environment |= {"OMP_NUM_THREADS": "1"}  # torch's own would be as many as cores for each worker
        code = subprocess.run((*command, *paths), cwd=ROOT, env=environment, check=False).returncode
        count = read(report) if report.exists() else Count()
    # A crash, an internal error and "no tests ran" leave no failure in the report but a code.
    return count if count.failed or not code else count + Count(failed=1)


def read(report: Path) -> Count:
    """Sum a junit report; an error in a fixture counts as a failure."""
    total = Count()
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        tests, failures, errors, skipped = (
            int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        )
        total += Count(tests - failures - errors - skipped, failures + errors, skipped)
    return total


def shown(command: tuple[str | Path, ...]) -> str:
    return " ".join(str(word).removeprefix(f"{ROOT}/") for word in command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
