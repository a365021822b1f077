"""`up` and `down`. Both may be called at any time, in any state, by several at once: a lock makes them take turns."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import build, cgroups, configure, images, leftovers, locks, network, requirements
from .api import JSON_PATCH, Api, poll
from .components import NODE
from .errors import ApiError, ClusterError, NotUp
from .kubeconfig import write_secret
from .network import Network
from .paths import Home, Place
from .progress import Progress

ENTRY = Path(__file__).resolve().parent.parent / "cluster"
# enters the cgroups before anything else, so that no process of the cluster is ever outside them
_ENTER = 'for group in $OUTRIDER_GROUPS; do echo 0 > "$group" || exit 1; done; exec "$@"'
_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True)
class Ready:
    """What `up` leaves for the other commands, in run/ready.json."""

    network: str  # as network.parse reads it
    token: str
    gpus: int

    @property
    def net(self) -> Network:
        return network.parse(self.network)

    def api(self, place: Place) -> Api:
        return Api(self.net.api_url, place.certificate, self.token)


def ready(place: Place) -> Ready | None:
    """The running cluster, or None: it is down, half started or half dead."""
    if not leftovers.init_pid(place):
        return None
    try:
        return Ready(**json.loads(place.ready.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def require_ready(place: Place) -> Ready:
    if up := ready(place):
        return up
    raise NotUp(f"cluster {place.name} is down: start it with `hack/cluster/cluster --name {place.name} up`")


def up(home: Home, place: Place, gpus: int | None, environment: Mapping[str, str] = os.environ) -> str:
    """Start the cluster unless it is up; returns when node, Services and DNS work, with a line for the user.

    `gpus` is how many nvidia.com/gpu the node claims to have; None leaves a running cluster as it is.
    """
    requirements.check_node(home)
    binaries = build.ensure(home)
    progress = Progress(f"cluster {place.name}")
    began = time.monotonic()
    with _turn(place, progress):
        if running := ready(place):
            if gpus is not None and gpus != running.gpus:
                running = _claim_gpus(place, running, gpus)
            return _summary(place, running, "already up")
        if leftovers.found(place):
            progress.say("clearing what was left of an earlier start")
            leftovers.remove(place)
        try:
            running = _start(home, place, binaries, environment.get("OUTRIDER_CLUSTER_NET"), progress)
            running = _claim_gpus(place, running, gpus or 0)
        except BaseException:
            leftovers.remove(place)
            raise
    return _summary(place, running, f"up in {time.monotonic() - began:.1f} s")


def down(place: Place, purge: bool = False) -> str:
    """Stop the cluster if it runs and clear all it left; images and logs stay unless `purge`."""
    if os.geteuid():
        raise ClusterError("root is needed: the node's processes are root's; run it with sudo -E")
    if not place.root.exists() and not leftovers.found(place):
        return f"cluster {place.name}: there is none"
    with _turn(place, Progress(f"cluster {place.name}")):
        ran = leftovers.found(place)
        leftovers.remove(place)
        if purge:
            shutil.rmtree(place.root, ignore_errors=True)
            place.lock.unlink(missing_ok=True)
    kept = "nothing is kept" if purge else f"images and logs are kept in {place.root}"
    return f"cluster {place.name}: {'down' if ran else 'was down already'}; {kept}"


def _turn(place: Place, progress: Progress) -> Any:
    return locks.hold(place.lock, lambda: progress.update("waiting for another up or down to end"))


def _summary(place: Place, running: Ready, what: str) -> str:
    return (
        f"cluster {place.name}: {what} (network {running.net.block}, {running.gpus} GPUs claimed); "
        f"export KUBECONFIG={place.kubeconfig}"
    )


def _start(home: Home, place: Place, binaries: Path, wanted: str | None, progress: Progress) -> Ready:
    shutil.rmtree(place.logs, ignore_errors=True)
    with locks.hold(leftovers.INTERFACES):  # from the choice of a network until its route tells others
        net = network.choose(wanted, network.used_here())
        token = configure.write(place, net)
        _launch(home, place, net)
        _connect(place, net)
    running = Ready(net.prefix, token, 0)
    api = running.api(place)
    steps: list[tuple[str, float, Callable[[], bool]]] = [
        ("containerd", 30, lambda: _connects(place.containerd_socket)),
        ("pause image", 30, lambda: _loads_pause(place, binaries)),
        ("API server", 60, lambda: place.certificate.exists() and api.answers("/readyz")),
        ("node", 60, lambda: _node_ready(api)),
        ("default ServiceAccount", 30, lambda: api.answers("/api/v1/namespaces/default/serviceaccounts/default")),
        ("Services", 30, lambda: _connects((net.kubernetes_ip, 443))),
        ("DNS", 30, lambda: _connects((net.node_ip, 53))),
    ]
    for what, seconds, probe in steps:
        _wait(place, what, seconds, probe, progress)
    return running


def _launch(home: Home, place: Place, net: Network) -> None:
    groups = cgroups.create(place.cgroup)
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"OUTRIDER_HOME": str(home.root), "OUTRIDER_GROUPS": " ".join(map(str, groups))}
    supervisor = [sys.executable, "-B", str(ENTRY), "--name", place.name, "_node", net.prefix]
    command = ["sh", "-c", _ENTER, "sh", *_UNSHARE, *supervisor]
    with (place.logs / "node.log").open("ab") as log:
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/", env=environment
        )
    if not poll(lambda: bool(leftovers.init_pid(place)), 30, interval=0.01):
        raise ClusterError(f"the node's namespaces could not be made: {_last_words(place)}")


def _connect(place: Place, net: Network) -> None:
    """One veth pair joins host and node; a route makes pods and Services reachable from the host."""
    init = leftovers.init_pid(place)
    for command in (
        f"link add {place.link} type veth peer name eth0 netns {init}",
        f"addr add {net.host_ip}/30 dev {place.link}",
        f"link set {place.link} up",
        f"route add {net.block} via {net.node_ip}",
    ):
        result = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
        if result.returncode:
            raise ClusterError(f"`ip {command}` failed: {result.stderr.strip() or _last_words(place)}")


def _wait(place: Place, what: str, seconds: float, probe: Callable[[], bool], progress: Progress) -> None:
    def attempt() -> bool:
        if not leftovers.init_pid(place):
            raise ClusterError(f"the node ended, waiting for {what}: {_last_words(place)}; logs are in {place.logs}")
        progress.update(f"waiting for {what}")
        return probe()

    if not poll(attempt, seconds):
        raise ClusterError(f"{what} not ready after {seconds:.0f} s: {_last_words(place)}; logs are in {place.logs}")


def _last_words(place: Place) -> str:
    """The end of the supervisor's log, which tells of components that do not stay up."""
    log = place.logs / "node.log"
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return " / ".join(line.strip() for line in lines[-4:] if line.strip()) or "every component runs"


def _connects(address: tuple[str, int] | Path) -> bool:
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    with socket.socket(family) as client:
        client.settimeout(0.5)
        try:
            client.connect(str(address) if isinstance(address, Path) else address)
        except OSError:
            return False
    return True


def _loads_pause(place: Place, binaries: Path) -> bool:
    try:
        images.load_pause(place, binaries / "pause")
    except ClusterError:
        return False  # containerd listens a moment before it serves
    return True


def _node_ready(api: Api) -> bool:
    try:
        node = api.request("GET", f"/api/v1/nodes/{NODE}", timeout=2)
    except (ApiError, OSError, http.client.HTTPException):
        return False
    return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])


def _claim_gpus(place: Place, running: Ready, gpus: int) -> Ready:
    """An extended resource that kubelet knows nothing of: it keeps the number and adds no device to the pod.

    Writes run/ready.json, so it is the last step of `up`.
    """
    if gpus or running.gpus:
        patch = [
            {"op": "add", "path": f"/status/{field}/nvidia.com~1gpu", "value": str(gpus)}
            for field in ("capacity", "allocatable")
        ]
        running.api(place).request("PATCH", f"/api/v1/nodes/{NODE}/status", patch, content_type=JSON_PATCH)
    running = replace(running, gpus=gpus)
    write_secret(place.ready, json.dumps(asdict(running)))
    return running
