"""Ends a cluster from whatever state it is in: running, half started, its processes killed, its folder torn."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from . import cgroups, locks
from .api import poll
from .errors import ClusterError
from .node import OWN_FOLDERS
from .paths import Place

INTERFACES = Path("/sys/class/net")  # also the machine-wide lock: who changes interfaces and routes holds it


def init_pid(place: Place) -> int:
    """The PID of the node's PID 1 as the host sees it, or 0 if no node runs."""
    return next((pid for pid in cgroups.processes(place.cgroup, cgroups.DAEMONS) if _is_init(pid)), 0)


def found(place: Place) -> bool:
    """Whether anything that `up` makes is there, running or not."""
    things = (place.run, place.conf, place.etcd, place.node, place.kubeconfig, INTERFACES / place.link)
    return bool(cgroups.processes(place.cgroup)) or any(path.exists() for path in things)


def remove(place: Place) -> None:
    """End every process and remove all but images and logs. Raises ClusterError if a process cannot be ended."""
    if not cgroups.end(place.cgroup):
        pids = sorted(cgroups.processes(place.cgroup))
        raise ClusterError(
            f"processes of cluster {place.name} do not end: {' '.join(map(str, pids)) or 'their cgroups are busy'}; "
            "they wait for the kernel (a full or failing disk?); try `down` again"
        )
    # the kernel drops the node's interfaces a moment after its last process
    if not poll(lambda: not (INTERFACES / place.link).exists(), 2):
        subprocess.run(["ip", "link", "delete", place.link], capture_output=True)
    with locks.hold(INTERFACES):
        if not any(_other_clusters(place)):
            for folder in OWN_FOLDERS:
                try:
                    Path(folder).rmdir()
                except OSError:
                    continue  # not empty, so not only ours; or never made
    place.kubeconfig.unlink(missing_ok=True)
    for state in (place.etcd, place.node, place.run, place.conf):
        shutil.rmtree(state, ignore_errors=True)


def _other_clusters(place: Place) -> Iterator[str]:
    for hierarchy in cgroups.hierarchies():
        for group in hierarchy.glob("outrider-*"):
            if group.name != place.cgroup:
                yield group.name


def _is_init(pid: int) -> bool:
    """Whether `pid` is PID 1 one namespace below ours, and not yet dead."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    own_depth = len(Path("/proc/self/status").read_text().split("NSpid:")[1].split("\n")[0].split())
    chain = fields.get("NSpid", "").split()
    return chain[own_depth:] == ["1"] and not fields["State"].strip().startswith("Z")
