"""Fixtures of the operator's tests on a real API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from localcluster.controlplane import ControlPlane
from tests.cluster.operator_rig import SYSTEM, Rig

from outrider_operator.kube import Client, load
from outrider_operator.settings import Settings

INSTALL = Path(__file__).parents[2] / "manifests" / "install"


@pytest.fixture(scope="session")
def installed(control_plane: ControlPlane) -> ControlPlane:
    """The API server with manifests/install: the CRD, and the operator's account with its rights."""
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(INSTALL))
    control_plane.kubectl("wait", "--for=condition=Established", "crd/speculativemodels.outrider.dev", "--timeout=20s")
    return control_plane


@pytest.fixture(scope="session")
def account(installed: ControlPlane) -> Path:
    """A kubeconfig of the operator's own ServiceAccount: a right that manifests/install lacks fails every test."""
    return installed.kubeconfig_for_service_account(SYSTEM, "outrider-operator")


@pytest.fixture
async def rig(installed: ControlPlane, account: Path, namespace: str) -> AsyncIterator[Rig]:
    client = Client(await load(str(installed.kubeconfig)))
    settings = Settings(
        kubeconfig=str(account),
        namespaces=(namespace,),
        namespace=SYSTEM,
        leader_elect=False,
        runtime_image="localhost/outrider-runtime:test",
        health_port=0,
        metrics_port=0,
        measure_seconds=0.2,
        retry_seconds=0.05,
        retry_limit_seconds=0.2,
    )
    rig = Rig(client, namespace, settings)
    try:
        yield rig
    finally:
        await rig.close()
