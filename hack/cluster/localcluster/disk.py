"""Free space is checked before a step begins: a disk that fills in the middle of one breaks more than that step."""

from __future__ import annotations

import shutil
from pathlib import Path

from .errors import ClusterError

GB = 10**9


def free(folder: Path) -> int:
    """Bytes free where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require(folder: Path, size: int, purpose: str, error: type[ClusterError] = ClusterError) -> None:
    """Raises `error` unless `size` bytes are free at `folder`."""
    if (have := free(folder)) < size:
        raise error(
            f"too little disk: {purpose} needs {size / GB:.1f} GB free at {folder}, {have / GB:.1f} GB are; "
            "free some, or set OUTRIDER_HOME to a folder on a larger disk"
        )
