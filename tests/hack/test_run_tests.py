"""The closing line must be true: it is what a reader, and continuous integration, goes by."""

from __future__ import annotations

from pathlib import Path

import pytest

import run_tests
from run_tests import Count, Part

REPORT = """<testsuites><testsuite tests="9" failures="2" errors="1" skipped="1"/></testsuites>"""


def test_an_error_in_a_fixture_counts_as_a_failure(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert run_tests.read(report) == Count(passed=5, failed=3, skipped=1)


@pytest.mark.parametrize(
    ("seconds", "failed"), [(9.0, 0), (20.0, 0), (20.5, 1)], ids=["within", "at twice", "over twice"]
)
def test_a_part_fails_when_it_takes_more_than_twice_its_budget(
    monkeypatch: pytest.MonkeyPatch, seconds: float, failed: int
) -> None:
    clock = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr(run_tests.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(run_tests, "pytest", lambda part: Count(passed=3))
    count, line = run_tests.run(Part("some", budget=10, paths=("tests",)))
    assert count == Count(passed=3, failed=failed)
    assert ("TOO SLOW" in line) == bool(failed)


def test_a_part_whose_preparation_fails_does_not_run_and_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_tests, "pytest", lambda part: pytest.fail("the part ran"))
    count, line = run_tests.run(Part("some", budget=10, paths=("tests",), needs=(("false",), ("true",))))
    assert count == Count(failed=1)
    assert "not run" in line


def test_a_run_that_collects_no_test_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Ended:
        returncode = 5

    monkeypatch.setattr(run_tests.subprocess, "run", lambda *args, **kwargs: Ended)
    assert run_tests.pytest(Part("some", budget=10, paths=(str(tmp_path),))) == Count(failed=1)


EVERY_KIND = """
import os, pytest, tempfile, time

@pytest.fixture
def broken():
    raise ValueError

@pytest.mark.parametrize("number", range(8))
def test_passes(number):
    assert os.environ.get("OMP_NUM_THREADS") == "1"

def test_paths_are_no_longer_than_in_one_process(tmp_path):
    assert len(str(tmp_path.parent)) <= len(tempfile.gettempdir() + "/pytest-of-root/pytest-100")

def test_is_skipped():
    pytest.skip("for a reason")

def test_fails():
    assert False

def test_has_no_fixture(broken): ...

@pytest.mark.timeout(0.5)
def test_hangs():
    time.sleep(60)

def test_ends_its_process():
    os._exit(1)
"""


def test_of_several_processes_the_count_is_the_same_and_what_hangs_or_dies_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_kinds.py").write_text(EVERY_KIND)
    count = run_tests.pytest(Part("some", budget=10, paths=(str(tmp_path),), workers=2))
    assert count == Count(passed=9, failed=4, skipped=1)
    said = capfd.readouterr().out
    for name in ("test_fails", "test_has_no_fixture", "test_hangs", "test_ends_its_process"):
        assert f"test_kinds.py::{name}" in said


def test_a_part_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tests.main(["units"]) == 2
    assert "units" in capsys.readouterr().out


def test_the_closing_line_stands_alone_and_names_all_three_counts() -> None:
    assert str(Count(12, 0, 3)) == "12 passed, 0 failed, 3 skipped"
