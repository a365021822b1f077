"""A real node that is started twice, killed anywhere and torn apart. The tests of this file build on one another."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster import cgroups
from localcluster.api import poll
from localcluster.node import COVERED_SYSCTLS

from .conftest import Cluster

pytestmark = [pytest.mark.node, pytest.mark.timeout(300)]


def test_up_returns_with_a_node_that_is_ready_and_has_the_claimed_gpus(cluster: Cluster) -> None:
    said = cluster.do("up", "--gpus", "2")
    assert re.fullmatch(
        rf"cluster {cluster.name}: up in .*2 GPUs.*; export KUBECONFIG={cluster.place.kubeconfig}\n", said
    )
    assert "nvidia.com/gpu:2" in cluster.kubectl(
        "get", "node", "-o", "jsonpath={.items[0].status.allocatable}"
    ).replace('"', "")
    assert cluster.do("kubeconfig").strip() == str(cluster.place.kubeconfig)


def test_started_again_it_says_so_and_changes_only_the_gpus(cluster: Cluster) -> None:
    before = cluster.init
    assert "already up" in cluster.do("up", "--gpus", "3")
    assert "already up (network" in cluster.do("up")
    assert cluster.init == before
    assert "3 GPUs" in cluster.do("status")


def test_the_machines_own_settings_stay_as_they_were(cluster: Cluster) -> None:
    """kubelet sets overcommit_memory to 1 and sees it set; the machine does not."""
    inside = cluster.do("sh", "cat", *(f"/proc/sys/{name}" for name in COVERED_SYSCTLS)).split()
    outside = [Path("/proc/sys", name).read_text().strip() for name in COVERED_SYSCTLS]
    assert inside != outside


def test_a_network_in_use_is_refused_in_one_line_and_another_is_chosen_if_none_is_named(
    cluster: Cluster, neighbour: Cluster
) -> None:
    mine = re.search(r"network (\d+\.\d+)\.0\.0/16", cluster.do("status"))
    assert mine
    refusal = neighbour.run("up", OUTRIDER_CLUSTER_NET=mine[1])
    assert refusal.returncode == 1
    assert re.fullmatch(rf"cluster: network {mine[1]}\.0\.0/16 is in use: .*choose another by .*\n", refusal.stderr)
    assert not neighbour.init
    neighbour.do("up")
    assert mine[1] not in neighbour.do("status").splitlines()[0]
    neighbour.do("down")
    assert "Ready" in cluster.kubectl("get", "nodes"), "the end of one is nothing to the other"


@pytest.mark.parametrize("victim", ["PID 1", "its parent"])
def test_after_its_supervisor_was_killed_it_is_called_half_started_and_down_clears_it(
    cluster: Cluster, victim: str
) -> None:
    cluster.do("up")
    parent = int(Path(f"/proc/{cluster.init}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(cluster.init if victim == "PID 1" else parent, signal.SIGKILL)
    assert poll(lambda: not cluster.init, 60)
    status = cluster.run("status")
    assert status.returncode == 4
    assert "half started" in status.stdout
    if victim == "PID 1":
        cluster.do("up")
    else:
        cluster.do("down")
        assert "down already" in cluster.do("down")
        assert cluster.run("status").returncode == 3


def test_up_killed_at_any_point_is_made_good_by_the_next_up(cluster: Cluster) -> None:
    chance = random.Random()
    for longest in (0.6, 4.0):
        seconds = chance.uniform(0.1, longest)
        with cluster.start("up") as start:
            time.sleep(seconds)
            start.kill()
            start.communicate()
    said = cluster.run("up")
    assert said.returncode == 0, f"killed after {seconds:.2f} s: {said.stderr}"
    assert "Ready" in cluster.kubectl("get", "nodes")
    cluster.do("down")


def test_two_starts_at_once_make_one_cluster_and_down_ends_it_though_its_folder_is_gone(cluster: Cluster) -> None:
    with cluster.start("up") as one, cluster.start("up") as two:
        said = sorted(process.communicate(timeout=200)[0] for process in (one, two))
    assert one.returncode == two.returncode == 0
    assert "already up" in said[0]
    assert "up in" in said[1]
    shutil.rmtree(cluster.place.root)
    cluster.do("down")
    assert not cgroups.processes(cluster.place.cgroup)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    """Around all the tests of this file."""
    before = traces(cluster)
    yield
    cluster.do("down")
    assert poll(lambda: not new_traces(cluster, before), 30), new_traces(cluster, before)


def new_traces(cluster: Cluster, before: set[str]) -> set[str]:
    """What is there now and was not, but for what others do meanwhile: other clusters' links, image builds."""
    others = re.compile(r"\bor[0-9a-f]{8}\b|containers/storage|buildah")
    return {line for line in traces(cluster) - before if cluster.place.link in line or not others.search(line)}


def traces(cluster: Cluster) -> set[str]:
    """A line for each interface, route, rule, mount and folder; and for each process of a test's cluster."""
    lines = set()
    for command in (
        ["ip", "-o", "-br", "link"],
        ["ip", "route", "show", "table", "all"],
        ["ip", "rule"],
        ["ip", "netns"],
        ["nft", "list", "ruleset"],
    ):
        output = subprocess.run(command, capture_output=True, text=True).stdout
        lines |= {f"{command[1]}: {line}" for line in output.splitlines()}
    lines |= {f"mount: {line.split()[1]}" for line in Path("/proc/mounts").read_text().splitlines()}
    lines |= {f"cgroup: {path}" for path in cgroups.ROOT.glob(f"*/{cluster.place.cgroup}")}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        lines |= {f"process: {words}"} if str(cluster.place.root) in words else set()
    return lines


def test_a_full_disk_is_said_before_anything_is_started(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="or") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
        try:
            refusal = cluster.run("up", OUTRIDER_HOME=folder)
            assert refusal.returncode == 1
            assert re.fullmatch(r"cluster: too little disk: a cluster needs 1\.0 GB free at .*\n", refusal.stderr)
            assert not list(Path(folder).rglob("*"))
        finally:
            subprocess.run(["umount", folder], check=True)
