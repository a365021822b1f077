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
CONTROLLERS = ("cpu", "cpuset", "hugetlb", "io", "memory", "pids")
_IN_A_CONTAINER = "a container needs --privileged --cgroupns=host"


def hierarchies(root: Path = ROOT) -> list[Path]:
    """Every v1 hierarchy (kubelet wants its group in all of them, name=systemd too), or the one of v2."""
    if (root / "cgroup.controllers").exists():
        return [root]
    # one hierarchy can have several names: cpu -> cpu,cpuacct
    return sorted({p.resolve() for p in root.iterdir() if p.is_dir() and (p / "tasks").exists()})


def create(name: str, root: Path = ROOT) -> list[Path]:
    """Make the group `name` and its group for daemons everywhere; the latter's `cgroup.procs` files."""
    found = hierarchies(root)
    if not found:
        raise ClusterError(f"no cgroups at {root}: mount them ({_IN_A_CONTAINER})")
    for hierarchy in found:
        is_v2 = (hierarchy / "cgroup.controllers").exists()
        parent = hierarchy
        for group in (hierarchy / name, hierarchy / name / DAEMONS):
            if is_v2:
                _hand_down(parent)
            group.mkdir(exist_ok=True)
            if not is_v2:
                _inherit_cpuset(parent, group)
            parent = group
    return [hierarchy / name / DAEMONS / "cgroup.procs" for hierarchy in found]


def _inherit_cpuset(parent: Path, group: Path) -> None:
    """A new v1 group may use no CPU and no memory, and then nothing may enter it."""
    for setting in ("cpuset.cpus", "cpuset.mems"):
        if (group / setting).exists():
            (group / setting).write_text((parent / setting).read_text())


def _hand_down(group: Path) -> None:
    """In v2 a group's children have only the controllers that it is told to give them; kubelet wants these."""
    has = (group / "cgroup.controllers").read_text().split()
    wanted = " ".join(f"+{controller}" for controller in has if controller in CONTROLLERS)
    try:
        (group / "cgroup.subtree_control").write_text(wanted)
    except OSError as error:
        raise ClusterError(f"{group} cannot hand {wanted} down: {error.strerror} ({_IN_A_CONTAINER})") from error


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
