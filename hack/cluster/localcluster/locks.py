"""One at a time: locks that the kernel drops with the process that holds them, so none is ever left behind."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def _nothing() -> None:
    pass


@contextmanager
def hold(path: Path, waiting: Callable[[], None] = _nothing) -> Iterator[None]:
    """Hold `path` (a file, made if need be, or a folder); `waiting` is called again and again while another has it.

    Who holds a file may delete it: whoever waited for that one then takes its successor.
    """
    descriptor = _open(path)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                time.sleep(0.1)
                continue
            if _is_at(descriptor, path):
                break
            os.close(descriptor)
            descriptor = _open(path)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    if path.is_dir():
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    if not path.exists():
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
