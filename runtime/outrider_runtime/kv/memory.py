"""How many KV blocks fit into memory beside the weights and a step's workspace."""

from __future__ import annotations

from pathlib import Path

import torch

CPU_CACHE_BYTES = 4 << 30  # enough for a demo or a test; a CPU serves no more
_LIMITS = (  # of the container: what it may use, what it uses
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def cache_bytes(device: torch.device, utilization: float, workspace: int) -> int:
    """Bytes for KV arrays. On a GPU what `utilization` leaves once the weights are there; on CPU at most half of what
    is free, since memory there is shared with others."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - utilization) * total) - workspace)
    return max(0, min(CPU_CACHE_BYTES, _free_host_bytes() // 2 - workspace))


def _free_host_bytes() -> int:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) << 10
    for limit, usage in _LIMITS:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):
            continue  # not this kind of cgroup, or without a limit ("max")
    return free
