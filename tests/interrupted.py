"""A program that gets a signal in the middle of its imports."""

from __future__ import annotations

import signal
from pathlib import Path

_MODULE = """
import os, time
try:
    os.kill(os.getpid(), {signum:d})
    time.sleep(10)
except BaseException:
    raise RuntimeError("dropped") from None
"""


def interrupt_import(folder: Path, module: str, signum: signal.Signals) -> None:
    """To whoever finds `folder` first, this module sends the signal, and drops whatever exception comes of it."""
    (folder / f"{module}.py").write_text(_MODULE.format(signum=signum))
