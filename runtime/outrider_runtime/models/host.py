"""What this machine gives the process: memory, less where its cgroups allow less, and folders to write to."""

from __future__ import annotations

import os
from pathlib import Path

from outrider_runtime.errors import Refusal
from outrider_runtime.models.memory import Memory


def writable(folder: Path) -> Path:
    """Made if it is not there. Raises Refusal."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "give another --download-dir"
        raise Refusal("InvalidArgument", f"{folder} cannot be made ({error.strerror}); {fix}") from error
    if not os.access(folder, os.W_OK):
        raise Refusal("InvalidArgument", f"{folder} cannot be written to; give another --download-dir")
    return folder


def cpu_memory(root: Path = Path("/")) -> Memory:
    """What this process may use: the machine's available memory, or less where its cgroups (v2 or v1) allow less."""
    info = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in (root / "proc/meminfo").read_text().splitlines()
    }
    total, free = info["MemTotal"], info["MemAvailable"]
    for limit, used in _cgroups(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Memory(total, free)


def _cgroups(root: Path) -> list[tuple[int, int]]:
    """(limit, use without reclaimable page cache) of every cgroup around this process that has a limit."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            base, limit, used, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, cache = "sys/fs/cgroup/memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # inside a container the path is often one that only the host knows; the container's own is then the root
        inner = Path(path.lstrip("/"))
        for folder in dict.fromkeys((root / base / inner, *(root / base / up for up in inner.parents), root / base)):
            try:
                allowed, taken = (folder / limit).read_text().strip(), int((folder / used).read_text())
                stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
            except OSError:
                continue
            if allowed != "max":
                found.append((int(allowed), taken - int(stat.get(cache, 0))))
    return found
