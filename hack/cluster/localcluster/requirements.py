"""What the machine must offer before anything is started: root, programs, disk. And how to get the programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from . import disk
from .errors import ClusterError
from .paths import Home

PACKAGES = Path(__file__).resolve().parent.parent / "packages.txt"
PROGRAMS = ("containerd", "ctr", "ip", "mount", "nft", "nsenter", "openssl", "runc", "skopeo", "unshare")
CNI_PLUGINS = Path("/usr/lib/cni")
SPACE_TO_RUN = disk.GB


def check_node(home: Home) -> None:
    """Raises ClusterError with all that is missing for a node."""
    if os.geteuid():
        raise ClusterError("root is needed: a node makes namespaces, mounts and interfaces; run it with sudo -E")
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    plugins = [CNI_PLUGINS / name for name in ("bridge", "host-local", "portmap")]
    missing += [str(plugin) for plugin in plugins if not plugin.exists()]
    if missing:
        raise ClusterError(f"missing: {', '.join(missing)}; run `hack/cluster/cluster packages`")
    disk.require(home.root, SPACE_TO_RUN, "a cluster")


def wanted_packages(text: str) -> list[str]:
    return text.split()


def missing_packages(wanted: list[str], dpkg_answer: str) -> list[str]:
    """`dpkg_answer` has a line "NAME STATUS-ABBREVIATION" for each package that dpkg knows."""
    installed = {words[0] for words in map(str.split, dpkg_answer.splitlines()) if words[1:] == ["ii"]}
    return [name for name in wanted if name not in installed]


def install_packages() -> str:
    """Installs what is missing of packages.txt; says in a line what it did."""
    wanted = wanted_packages(PACKAGES.read_text())
    if not shutil.which("dpkg-query") or not shutil.which("apt-get"):
        raise ClusterError(f"this is no Debian: install what it calls {', '.join(wanted)}")
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Abbrev}\n", *wanted]
    missing = missing_packages(wanted, subprocess.run(query, capture_output=True, text=True).stdout)
    if not missing:
        return f"packages: all {len(wanted)} present"
    if os.geteuid():
        raise ClusterError(f"root is needed to install {' '.join(missing)}; run it with sudo")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        result = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True)
        if result.returncode:
            raise ClusterError(f"apt-get {command[0]} failed: {result.stderr.strip()[-300:]}")
    return f"packages: installed {', '.join(missing)}"
