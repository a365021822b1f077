"""The cluster's cgroups: they hold every process of it, so they tell what runs and end what is left.

Their name comes from the cluster's folder alone, so nothing is lost with a deleted or torn state folder.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from .api import poll
from .errors import ClusterError

ROOT = Path("/sys/fs/cgroup")
DAEMONS = "daemons"


def hierarchies(root: Path = ROOT) -> list[Path]:
    """Every v1 hierarchy (kubelet wants its group in all of them, name=systemd too), or the one of v2."""
    if (root / "cgroup.controllers").exists():
        return [root]
    # one hierarchy can have several names: cpu -> cpu,cpuacct
    return sorted({p.resolve() for p in root.iterdir() if p.is_dir() and (p / "tasks").exists()})


def create(name: str) -> list[Path]:
    """Make the group `name` and its group for daemons everywhere; the latter's `cgroup.procs` files."""
    found = hierarchies()
    if not found:
        raise ClusterError(f"no cgroups at {ROOT}: mount them (a container needs --privileged --cgroupns=host)")
    for hierarchy in found:
        for group in (hierarchy / name, hierarchy / name / DAEMONS):
            group.mkdir(exist_ok=True)
            if (hierarchy / "cgroup.controllers").exists():
                if group.name == name:
                    controllers = (hierarchy / "cgroup.controllers").read_text().split()
                    (group / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in controllers))
                continue
            for setting in ("cpuset.cpus", "cpuset.mems"):  # empty in a new v1 group, and then nothing may enter
                if (group / setting).exists():
                    (group / setting).write_text((group.parent / setting).read_text())
    return [hierarchy / name / DAEMONS / "cgroup.procs" for hierarchy in found]


def processes(name: str, group: str = "") -> set[int]:
    """The PIDs, as this process sees them, of all in `name` (or in one group of it, like "daemons")."""
    return {pid for folder in _groups(name, group) for pid in _pids(folder)}


def end(name: str, seconds: float = 20) -> bool:
    """Kill every process in `name` and remove the groups; whether nothing of it is left."""

    def gone() -> bool:
        for pid in processes(name):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        left = False
        for folder in _groups(name):
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                left = True  # a process in it is still dying
        return not left

    return poll(gone, seconds, interval=0.02)


def _groups(name: str, group: str = "") -> Iterator[Path]:
    """The folders of the groups, children before parents."""
    # not only where `create` made one: runc makes its own in others, like v1's empty "unified"
    for hierarchy in {ROOT, *hierarchies(), *(p.resolve() for p in ROOT.iterdir() if p.is_dir())}:
        for folder, _, _ in os.walk(hierarchy / name / group, topdown=False):
            yield Path(folder)


def _pids(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split() if pid != "0"]
    except OSError:
        return []
