"""PID 1 of the node's namespaces: prepares them, then runs every component and starts again what ends.

When it ends the kernel ends all else in there, containers included, and drops mounts, interfaces and rules with
them: that is why `down` can be sure to leave nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from . import components
from .network import Network
from .paths import Place

# bound into the cluster's folder; on the host these stay empty
OWN_FOLDERS = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers")
# kubelet writes these, and they are the whole machine's: in the node, plain files cover them
COVERED_SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
                   "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes")  # fmt: skip
RESTART_DELAY = 1.0  # seconds


@dataclass(frozen=True)
class Child:
    """A component that runs. It holds the Popen, which once forgotten would reap the process behind our back."""

    name: str
    process: subprocess.Popen[bytes]


def run(place: Place, network: Network, binaries: Path) -> None:
    """Never returns but by SIGTERM."""
    _prepare_mounts(place)
    _prepare_network(network)
    _supervise(place, network, binaries)


def _prepare_mounts(place: Place) -> None:
    for path in map(Path, OWN_FOLDERS):
        source = place.node / "-".join(path.parts[1:])
        source.mkdir(parents=True, exist_ok=True)
        path.mkdir(parents=True, exist_ok=True)
        _do("mount", "--bind", source, path)
    _do("mount", "-t", "tmpfs", "tmpfs", "/run")
    for folder in ("/run/lock", "/run/netns", "/run/sysctl"):
        Path(folder).mkdir()
    for name in COVERED_SYSCTLS:
        cover = Path("/run/sysctl", name.replace("/", "-"))
        cover.write_text(Path("/proc/sys", name).read_text())
        _do("mount", "--bind", cover, f"/proc/sys/{name}")
    _do("mount", "--make-rshared", "/")


def _prepare_network(network: Network) -> None:
    while subprocess.run(["ip", "link", "show", "eth0"], capture_output=True).returncode:
        time.sleep(0.02)  # `up` puts our end of the veth pair here
    # no default route: pods reach one another, the node and the host, and nothing else
    for command in ("link set lo up", f"addr add {network.node_ip}/30 dev eth0", "link set eth0 up"):
        _do("ip", *command.split())
    for key in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"):
        setting = Path("/proc/sys", key)
        if setting.exists():
            setting.write_text("1")


def _supervise(place: Place, network: Network, binaries: Path) -> None:
    commands = {
        name: [shutil.which(name) or name if name == "containerd" else str(binaries / name), *arguments]
        for name, arguments in components.arguments(place, network).items()
    }
    start_at = dict.fromkeys(commands, 0.0)
    running: dict[int, Child] = {}
    stopping = False

    def on_term(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, on_term)
    while not stopping:
        for name, when in list(start_at.items()):
            if time.monotonic() < when:
                continue
            if name in components.NEED_API and not _api_listens():
                continue
            del start_at[name]
            process = _start(commands[name], place.logs / f"{name}.log")
            running[process.pid] = Child(name, process)
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)  # also reaps what the container shims leave behind
        except ChildProcessError:
            pid, status = 0, 0
        if pid in running:
            ended = running.pop(pid)
            ended.process.returncode = os.waitstatus_to_exitcode(status)
            print(f"{time.strftime('%H:%M:%S')} {ended.name} ended with {ended.process.returncode}", flush=True)
            start_at[ended.name] = time.monotonic() + RESTART_DELAY
            for child in running.values():
                if child.name in components.FOLLOWERS.get(ended.name, ()):
                    os.kill(child.process.pid, signal.SIGKILL)
        elif not pid:
            time.sleep(0.05)


def _api_listens() -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", components.API_PORT)) == 0


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", start_new_session=True
        )


def _do(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)
