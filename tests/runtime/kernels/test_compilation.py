"""What the interpreter runs must also compile: it knows neither the compiler's types nor the machine's limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
HOME = Path(os.environ.get("OUTRIDER_HOME", "~/.cache/outrider")).expanduser()


@pytest.mark.timeout(600)
@pytest.mark.skipif(not PTXAS.is_file(), reason=f"Triton came without its assembler, {PTXAS.name}")
@pytest.mark.parametrize("target", ["90", "89"])
def test_kernels_compile_and_fit_into_shared_memory(target):
    """All of them for an H100; for an L4 or L40S those that have most there. What has compiled once is found again, by
    its source."""
    run("compile_all", target)


@pytest.mark.skipif(not PTXAS.is_file(), reason=f"Triton came without its assembler, {PTXAS.name}")
def test_what_a_server_runs_first_launches_nothing_that_was_not_compiled_ahead():
    run("rehearse_all")


def run(script: str, *arguments: str) -> None:
    """In a process of its own, as this one interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(HOME / "triton"),
        "TRITON_DEFAULT_FP_FUSION": "1",  # Triton warns that its default will change
    }
    command = [sys.executable, "-m", f"tests.runtime.kernels.{script}", *arguments]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
