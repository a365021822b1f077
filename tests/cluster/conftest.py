"""A real API server for the tests of this folder: started once a session, a fresh namespace for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator

import pytest
from localcluster import build
from localcluster.controlplane import ControlPlane
from localcluster.errors import NotBuilt
from localcluster.paths import Home


def _running(controllers: bool) -> Iterator[ControlPlane]:
    try:
        binaries = build.ensure(Home.of())
    except NotBuilt as error:
        required = os.environ.get("CI") == "true" or os.environ.get("OUTRIDER_REQUIRE_CLUSTER") == "1"
        (pytest.fail if required else pytest.skip)(str(error))
    with ControlPlane(binaries, controllers=controllers) as plane:
        yield plane


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """etcd and kube-apiserver: objects stay as they are written, nothing acts on them."""
    yield from _running(controllers=False)


@pytest.fixture(scope="session")
def control_plane_with_controllers() -> Iterator[ControlPlane]:
    """The same with kube-controller-manager: garbage collection, ReplicaSets of Deployments, namespaces that end."""
    yield from _running(controllers=True)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of this test alone, in whichever control plane the test uses."""
    with_controllers = "control_plane_with_controllers" in request.fixturenames
    plane: ControlPlane = request.getfixturevalue(
        "control_plane_with_controllers" if with_controllers else "control_plane"
    )
    name = f"test-{uuid.uuid4().hex[:8]}"
    plane.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    plane.end_namespace(name)


@pytest.fixture
def kubectl(request: pytest.FixtureRequest) -> Callable[..., str]:
    """kubectl as admin of the control plane that the test uses: kubectl("get", "pods") returns its output."""
    with_controllers = "control_plane_with_controllers" in request.fixturenames
    plane: ControlPlane = request.getfixturevalue(
        "control_plane_with_controllers" if with_controllers else "control_plane"
    )
    return plane.kubectl
