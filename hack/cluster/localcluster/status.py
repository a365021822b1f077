"""What runs and what it takes: processes, memory, disk, node and pods."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import build, cgroups, components, disk, leftovers
from .lifecycle import Ready, ready
from .paths import Home, Place


@dataclass(frozen=True)
class Process:
    """A component's process as the host sees it; `resident` memory in MiB counts shared pages too."""

    name: str
    pid: int
    resident: int


def processes(place: Place) -> Iterator[Process]:
    """The running components."""
    names = {*components.NEED_API, *build.PROGRAMS, "containerd"}
    for pid in sorted(cgroups.processes(place.cgroup, cgroups.DAEMONS)):
        try:
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if (name := Path(program).name) in names and "VmRSS:" in status:
            yield Process(name, pid, int(status.split("VmRSS:")[1].split()[0]) // 1024)


def report(home: Home, place: Place) -> tuple[int, str]:
    """The exit code (0 up, 3 down, 4 half started) and the text of `cluster status`."""
    running = ready(place)
    if not running and not leftovers.found(place):
        return 3, "\n".join([f"cluster {place.name}: down", *_disk_lines(home, place)])
    if not running:
        return 4, f"cluster {place.name}: half started; `up` starts it afresh, `down` clears it"
    return 0, "\n".join([*_lines(place, running), *_disk_lines(home, place), _objects(home, place)])


def _lines(place: Place, running: Ready) -> Iterator[str]:
    yield f"cluster {place.name}: up, network {running.net.block}, {running.gpus} GPUs claimed"
    yield f"kubeconfig {place.kubeconfig}"
    yield f"logs {place.logs}"
    for process in processes(place):
        yield f"{process.name:24} pid {process.pid:>8} {process.resident:5} MiB"


def _disk_lines(home: Home, place: Place) -> Iterator[str]:
    folders = [("images in the node", [place.layout, place.containerd]), ("images in buildah", [home.image_storage])]
    for what, paths in folders:
        if size := disk_use(paths):
            yield f"disk: {what} {size / disk.GB:.1f} GB"
    yield f"disk: {disk.free(home.root) / disk.GB:.1f} GB free at {home.root}"


def disk_use(paths: Iterable[Path]) -> int:
    """Bytes on disk under `paths` together; what is hard-linked between them counts once."""
    present = [str(path) for path in paths if path.exists()]
    if not present:
        return 0
    result = subprocess.run(["du", "-s", "-c", "-B1", *present], capture_output=True, text=True)
    return int(result.stdout.split("\n")[-2].split()[0])


def _objects(home: Home, place: Place) -> str:
    kubectl = [str(build.binaries(home) / "kubectl"), "--kubeconfig", str(place.kubeconfig)]
    command = [*kubectl, "get", "nodes,pods", "-A", "-o", "wide"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return (result.stdout or result.stderr).rstrip()
