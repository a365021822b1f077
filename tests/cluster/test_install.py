"""manifests/install on a real API server: everything is accepted, and the operator's account may do its work only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest
from localcluster.api import MERGE_PATCH, poll
from localcluster.controlplane import ControlPlane
from localcluster.errors import ApiError
from tests.operator.api.objects import model

ROOT = Path(__file__).parents[2]
SYSTEM = "outrider-system"
ACCOUNT = f"system:serviceaccount:{SYSTEM}:outrider-operator"


@pytest.fixture(scope="module")
def installed(control_plane: ControlPlane) -> ControlPlane:
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(ROOT / "manifests/install"))
    return control_plane


def test_installing_again_changes_nothing(installed: ControlPlane) -> None:
    path = f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/outrider-operator"
    before = installed.api.request("GET", path)["metadata"]
    installed.kubectl("apply", "--server-side", "-k", str(ROOT / "manifests/install"))
    after = installed.api.request("GET", path)["metadata"]
    assert after["resourceVersion"] == before["resourceVersion"]


def test_the_server_accepts_the_components_that_need_no_other_definitions(
    installed: ControlPlane, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "manifests", tmp_path / "manifests")
    shutil.copytree(ROOT / "crds", tmp_path / "crds")
    overlay = tmp_path / "manifests/overlay"
    overlay.mkdir()
    components = [f"../components/{name}" for name in ("ha", "network-policy")]
    (overlay / "kustomization.yaml").write_text(json.dumps({"resources": ["../install"], "components": components}))
    output = installed.kubectl("apply", "--server-side", "--dry-run=server", "-k", str(overlay))
    assert "poddisruptionbudget.policy/outrider-operator serverside-applied" in output
    assert "networkpolicy.networking.k8s.io/outrider-operator serverside-applied" in output


def _pod(plane: ControlPlane) -> dict[str, Any]:
    path = f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/outrider-operator"
    template = plane.api.request("GET", path)["spec"]["template"]
    return {"metadata": {"generateName": "outrider-operator-", **template["metadata"]}, "spec": template["spec"]}


def test_the_operators_pod_is_admitted_under_the_restricted_standard(installed: ControlPlane) -> None:
    pods = f"/api/v1/namespaces/{SYSTEM}/pods?dryRun=All"
    pod = _pod(installed)
    installed.api.request("POST", pods, pod)
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(ApiError, match="violates PodSecurity"):
        installed.api.request("POST", pods, pod)


def _may(plane: ControlPlane, verb: str, resource: str, namespace: str, name: str = "", user: str = ACCOUNT) -> bool:
    """`resource` like apps/deployments, or outrider.dev/speculativemodels/status."""
    group, plural, *subresource = resource.split("/")
    attributes = {"verb": verb, "group": group, "resource": plural, "namespace": namespace, "name": name}
    body = {"spec": {"user": user, "resourceAttributes": attributes | {"subresource": "/".join(subresource)}}}
    answer = plane.api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
    return bool(answer["status"]["allowed"])


MAY = (
    ("list", "outrider.dev/speculativemodels", ""),
    ("watch", "outrider.dev/speculativemodels", "default"),
    ("patch", "outrider.dev/speculativemodels/status", "default"),
    ("create", "apps/deployments", "default"),
    ("patch", "apps/deployments", "default"),
    ("delete", "/services", "default"),
    ("patch", "/configmaps", "default"),
    ("create", "/persistentvolumeclaims", "default"),
    ("patch", "policy/poddisruptionbudgets", "default"),
    ("patch", "networking.k8s.io/networkpolicies", "default"),
    ("watch", "/pods", ""),
    ("get", "/secrets", "default"),
    ("create", "/secrets", "default"),
    ("create", "events.k8s.io/events", "default"),
    ("create", "coordination.k8s.io/leases", SYSTEM),
)
MAY_NOT = (
    ("list", "/secrets", "default"),
    ("watch", "/secrets", ""),
    ("patch", "/secrets", "default"),
    ("delete", "/secrets", "default"),
    ("update", "outrider.dev/speculativemodels", "default"),
    ("patch", "outrider.dev/speculativemodels", "default"),
    ("delete", "outrider.dev/speculativemodels", "default"),
    ("patch", "outrider.dev/speculativemodels/scale", "default"),
    ("patch", "apps/deployments/scale", "default"),
    ("create", "/pods", "default"),
    ("delete", "/pods", "default"),
    ("create", "/pods/exec", "default"),
    ("list", "/nodes", ""),
    ("list", "apiextensions.k8s.io/customresourcedefinitions", ""),
    ("create", "rbac.authorization.k8s.io/clusterrolebindings", ""),
    ("create", "coordination.k8s.io/leases", "default"),
    ("delete", "coordination.k8s.io/leases", SYSTEM),
)


@pytest.mark.parametrize(("verb", "resource", "namespace"), MAY)
def test_the_operators_account_may(installed: ControlPlane, verb: str, resource: str, namespace: str) -> None:
    assert _may(installed, verb, resource, namespace)


@pytest.mark.parametrize(("verb", "resource", "namespace"), MAY_NOT)
def test_the_operators_account_may_not(installed: ControlPlane, verb: str, resource: str, namespace: str) -> None:
    assert not _may(installed, verb, resource, namespace)


def test_the_operators_account_may_renew_its_own_lease_only(installed: ControlPlane) -> None:
    for verb in ("get", "update"):
        assert _may(installed, verb, "coordination.k8s.io/leases", SYSTEM, "outrider-operator")
        assert not _may(installed, verb, "coordination.k8s.io/leases", SYSTEM, "somebody-elses")


def test_a_stranger_may_nothing(installed: ControlPlane) -> None:
    """What the answers above are worth: this API server does check rights."""
    assert not _may(installed, "list", "outrider.dev/speculativemodels", "", user="stranger")


CHILDREN = (
    "/api/v1/namespaces/{}/secrets/qwen-admin",
    "/api/v1/namespaces/{}/configmaps/qwen-policy",
    "/api/v1/namespaces/{}/persistentvolumeclaims/qwen-cache",
    "/apis/apps/v1/namespaces/{}/deployments/qwen",
    "/api/v1/namespaces/{}/services/qwen",
    "/apis/policy/v1/namespaces/{}/poddisruptionbudgets/qwen",
    "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies/qwen",
)


# The server's command is the operator's alone: a Warning is due.
REFUSED = {"podTemplate": {"spec": {"containers": [{"name": "server", "command": ["sleep"]}]}}}


def test_those_rights_are_all_the_operator_needs(installed: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """It runs as its account from start to a new object's children, status and event, and is refused nothing."""
    api = installed.api
    config = installed.kubeconfig_for_service_account(SYSTEM, "outrider-operator")
    flags = ["--kubeconfig", str(config), "--namespace", SYSTEM, "--health-port", "0", "--metrics-port", "0"]
    flags += ["--network-policy", "true", "--namespaces", namespace]
    models = f"/apis/outrider.dev/v1alpha1/namespaces/{namespace}/speculativemodels"
    events = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"

    def done() -> bool:
        status = api.request("GET", f"{models}/qwen")["status"]
        return status.get("observedGeneration") == 1 and all(api.answers(child.format(namespace)) for child in CHILDREN)

    with (tmp_path / "log").open("w+") as log, _operator(flags, log):
        api.request("POST", models, model(cache={"size": "1Gi"}))
        finished = poll(done, 30)
        api.request("PATCH", f"{models}/qwen", {"spec": REFUSED}, content_type=MERGE_PATCH)
        told = poll(lambda: "Refused" in [event["reason"] for event in api.request("GET", events)["items"]], 20)
        log.seek(0)
        text = log.read()
    assert finished, text
    assert told, text
    assert "forbidden" not in text.lower()
    lease = api.request("GET", f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/outrider-operator")
    assert lease["spec"]["holderIdentity"] == "", "released on the way out"


@contextmanager
def _operator(flags: list[str], log: TextIO) -> Iterator[None]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "operator")}
    command = [sys.executable, "-m", "outrider_operator", *flags]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)
