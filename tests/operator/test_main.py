"""`outrider-operator` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.interrupted import interrupt_import

OPERATOR = Path(__file__).parents[2] / "operator"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_an_import_ends_it_well(tmp_path: Path, signum: signal.Signals) -> None:
    interrupt_import(tmp_path, "kopf", signum)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(OPERATOR)))}
    command = [sys.executable, "-m", "outrider_operator"]
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
