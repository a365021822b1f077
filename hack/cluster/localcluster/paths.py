"""Where everything lives: one folder, OUTRIDER_HOME, holds binaries, build caches and every cluster's state."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError

SOURCES = Path(__file__).resolve().parent.parent / "go"
LONGEST_SOCKET = 107  # bytes of a unix socket's path, sun_path less its terminating zero


@dataclass(frozen=True)
class Home:
    """OUTRIDER_HOME."""

    root: Path

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Home:
        return cls(Path(environment.get("OUTRIDER_HOME") or "~/.cache/outrider").expanduser().resolve())

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def go_build(self) -> Path:
        return self.root / "go" / "build"

    @property
    def go_mod(self) -> Path:
        return self.root / "go" / "mod"

    @property
    def image_storage(self) -> Path:
        """buildah's --root."""
        return self.root / "containers" / "storage"

    @property
    def image_run(self) -> Path:
        """buildah's --runroot."""
        return self.root / "containers" / "run"

    @property
    def clusters(self) -> Path:
        return self.root / "clusters"


@dataclass(frozen=True)
class Place:
    """One cluster's folder and the names derived from it."""

    name: str
    root: Path

    @classmethod
    def of(cls, home: Home, name: str) -> Place:
        """Raises ClusterError for a name that could not be part of host names and socket paths."""
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?", name):
            raise ClusterError(f"cluster name {name!r}: use 1 to 20 of a-z, 0-9 and -, like 'e2e'")
        place = cls(name, home.clusters / name)
        longest = f"{place.containerd_socket}.ttrpc"
        if len(longest.encode()) > LONGEST_SOCKET:
            raise ClusterError(
                f"OUTRIDER_HOME is too long: sockets in {place.run} would pass {LONGEST_SOCKET} bytes; "
                "set OUTRIDER_HOME to a shorter path"
            )
        return place

    @property
    def identity(self) -> str:
        """Eight hex digits that tell this cluster from every other on the machine."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:8]

    @property
    def cgroup(self) -> str:
        return f"outrider-{self.identity}"

    @property
    def link(self) -> str:
        """The host's end of the veth pair."""
        return f"or{self.identity}"

    @property
    def lock(self) -> Path:
        """Beside the folder, not in it: `down --purge` removes the folder while it holds the lock."""
        return self.root.parent / f".{self.name}.lock"

    @property
    def conf(self) -> Path:
        return self.root / "conf"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def etcd(self) -> Path:
        return self.root / "etcd"

    @property
    def node(self) -> Path:
        """What the node's /var/lib/kubelet, /var/log/pods … really are."""
        return self.root / "node"

    @property
    def containerd(self) -> Path:
        return self.root / "containerd"

    @property
    def layout(self) -> Path:
        """The OCI image layout that images pass through; its blobs are hard links to containerd's."""
        return self.root / "oci"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def certificate(self) -> Path:
        """Written by kube-apiserver for itself; every client's certificate authority."""
        return self.conf / "pki" / "apiserver.crt"

    @property
    def containerd_socket(self) -> Path:
        return self.run / "containerd.sock"

    @property
    def ready(self) -> Path:
        """Written last by `up`: a running node without it was only half started."""
        return self.run / "ready.json"
