"""Clusters of the tests' own, beside whatever else runs on the machine; each ends with the test that made it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
from localcluster import build, leftovers
from localcluster.errors import ClusterError, NotBuilt
from localcluster.lifecycle import ENTRY
from localcluster.paths import Home, Place
from localcluster.requirements import check_node


@dataclass(frozen=True)
class Cluster:
    """The command for one cluster, as a user runs it."""

    name: str

    @property
    def place(self) -> Place:
        return Place.of(Home.of(), self.name)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("CLUSTER", "KUBECONFIG", "OUTRIDER_CLUSTER_NET")}
        return subprocess.Popen(
            [sys.executable, str(ENTRY), "--name", self.name, *words], env={**kept, **environment}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        with self.start(*words, **environment) as process:
            output, errors = process.communicate(timeout=200)
        return subprocess.CompletedProcess(words, process.returncode, output, errors)

    def do(self, *words: str, **environment: str) -> str:
        """The command's output; fails the test if the command fails."""
        result = self.run(*words, **environment)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def kubectl(self, *words: str) -> str:
        return self.do("kubectl", *words)

    @property
    def init(self) -> int:
        return leftovers.init_pid(self.place)


def _name(number: int) -> str:
    """Of this test run alone: others may run at the same time."""
    return f"test{number}-{os.getpid()}"


def _forget_killed_runs() -> None:
    for folder in Home.of().clusters.glob("test[12]-*"):
        if not Path("/proc", folder.name.partition("-")[2]).exists():
            Cluster(folder.name).do("down", "--purge")


def _cannot_run(error: ClusterError) -> NoReturn:
    required = os.environ.get("CI") == "true" or os.environ.get("OUTRIDER_REQUIRE_CLUSTER") == "1"
    (pytest.fail if required else pytest.skip)(str(error))


@pytest.fixture(scope="session")
def binaries() -> Path:
    """The folder of the components, compiled if they are not yet."""
    try:
        return build.ensure(Home.of())
    except NotBuilt as error:
        _cannot_run(error)


def _cluster(name: str) -> Iterator[Cluster]:
    try:
        check_node(Home.of())
    except ClusterError as error:
        _cannot_run(error)
    _forget_killed_runs()
    cluster = Cluster(name)
    yield cluster
    cluster.do("down", "--purge")


@pytest.fixture(scope="module")
def cluster(binaries: Path) -> Iterator[Cluster]:
    """A cluster that is down, the tests of a file share it."""
    yield from _cluster(_name(1))


@pytest.fixture
def neighbour(binaries: Path) -> Iterator[Cluster]:
    """Another, for what two clusters do to one another."""
    yield from _cluster(_name(2))
