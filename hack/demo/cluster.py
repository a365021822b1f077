"""Which cluster: the local one of hack/cluster, or with CLUSTER=current whichever kubectl points at."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from localcluster import build
from localcluster.disk import GB, free
from localcluster.paths import Place

from .kubectl import Kubectl
from .steps import HOME, ROOT, Step, StepError, step

PROGRAM = ROOT / "hack/cluster/cluster"
# What a new machine needs before its first demo: environment 5 GB, cluster binary and its caches 8, image
# storage 6, the node's two copies of the runtime image 11.
SPACE = 30 * GB
SPACE_WARM = 4 * GB


@dataclass(frozen=True)
class Cluster:
    """A `local` cluster is started, given images and reached by ClusterIP; a foreign one is only used."""

    kubectl: Kubectl
    local: bool

    def up(self, step: Step) -> str:
        """Start it unless it runs; says in words what there is."""
        if not self.local:
            return f"using the current context, {self.kubectl('config', 'current-context').strip()}"
        step.run(PROGRAM, "build")  # waits for the one that `begin` started
        step.run(PROGRAM, "up")
        return "up: the node is Ready, Services and DNS answer"

    def load(self, step: Step, *images: str) -> None:
        """Bring images to the node; a foreign cluster must be able to pull them."""
        if self.local:
            step.run(PROGRAM, "load-image", *images)

    @contextmanager
    def reach(self, kubectl: Kubectl, service: str) -> Iterator[str]:
        """The base URL of a Service: its ClusterIP where the host has a route to it, else a port-forward."""
        if self.local:
            spec = (kubectl.get("service", service) or {})["spec"]
            yield f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"
            return
        with socket.socket() as free_port:
            free_port.bind(("127.0.0.1", 0))
            port = free_port.getsockname()[1]
        forward = subprocess.Popen(
            kubectl.command("port-forward", f"service/{service}", f"{port}:80"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # it reports every connection that a client closes
        )
        try:
            _wait_for_port(port, forward)
            yield f"http://127.0.0.1:{port}"
        finally:
            forward.terminate()
            forward.wait()


def choose() -> Cluster:
    """By CLUSTER: `current`, or else the local cluster (OUTRIDER_CLUSTER names it)."""
    ours = build.binaries(HOME) / "kubectl"
    if os.environ.get("CLUSTER") == "current":
        return Cluster(Kubectl(shutil.which("kubectl") or ours), local=False)
    place = Place.of(HOME, os.environ.get("OUTRIDER_CLUSTER") or "default")
    return Cluster(Kubectl(ours, place.kubeconfig), local=True)


def check_space() -> None:
    """Before anything starts: a disk that fills in the middle breaks more than one step."""
    need = SPACE_WARM if (HOME.root / "demo/loaded").exists() else SPACE
    if (have := free(HOME.root)) < need:
        raise StepError(
            f"{need / GB:.0f} GB of free disk are needed at {HOME.root}, {have / GB:.1f} GB are free; "
            "free some, or set OUTRIDER_HOME to a folder on a larger disk"
        )


def _wait_for_port(port: int, process: subprocess.Popen[bytes], deadline: float = 15) -> None:
    end = time.monotonic() + deadline
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise StepError(f"`kubectl port-forward` did not open port {port}")


def begin() -> None:
    """What comes before all else: room on the disk, and the long compilation on its way in the background."""
    with step("disk", ["df -h"]):
        check_space()
    if os.environ.get("CLUSTER") != "current":
        with step("packages", ["apt-get update"]) as now:
            now.run(PROGRAM, "packages")
            now.run(PROGRAM, "build", "--background")


if __name__ == "__main__":  # with the standard library alone: the development environment may not exist yet
    begin()
