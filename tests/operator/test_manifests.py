"""manifests/ as kustomize builds it: complete, hardened, and with the rights the operator needs and no more."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider_operator.api import crd
from outrider_operator.kinds import watched
from outrider_operator.settings import Settings

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
COMPONENTS = sorted(path.parent.name for path in MANIFESTS.glob("components/*/kustomization.yaml"))

CHILD = {"get", "list", "watch", "create", "patch", "delete"}
RIGHTS = {  # of the ClusterRole: resource -> verbs
    "outrider.dev/speculativemodels": {"get", "list", "watch"},
    "outrider.dev/speculativemodels/status": {"patch"},
    "outrider.dev/speculativemodels/finalizers": {"update"},
    "/services": CHILD,
    "/configmaps": CHILD,
    "/persistentvolumeclaims": CHILD,
    "apps/deployments": CHILD,
    "policy/poddisruptionbudgets": CHILD,
    "networking.k8s.io/networkpolicies": CHILD,
    "/pods": {"list", "watch"},
    "/secrets": {"get", "create"},
    "events.k8s.io/events": {"create"},
}


@pytest.fixture(scope="module")
def overlays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of manifests/ and crds/ to add overlays to, as a user's checkout would be."""
    if not shutil.which("kubectl"):
        pytest.skip("kustomize is part of kubectl, and no kubectl is on the path")
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(MANIFESTS, root / "manifests")
    shutil.copytree(ROOT / "crds", root / "crds")
    return root / "manifests"


def _build(folder: Path) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return [body for body in yaml.safe_load_all(result.stdout) if body]


def _with(overlays: Path, name: str, **fields: Any) -> list[dict[str, Any]]:
    folder = overlays / name
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(json.dumps({"resources": ["../install"], **fields}))
    return _build(folder)


@pytest.fixture(scope="module")
def install(overlays: Path) -> list[dict[str, Any]]:
    return _build(overlays / "install")


def _one(objects: list[dict[str, Any]], kind: str, prefix: str = "") -> dict[str, Any]:
    found = [body for body in objects if body["kind"] == kind and body["metadata"]["name"].startswith(prefix)]
    assert len(found) == 1, [body["metadata"]["name"] for body in found]
    return found[0]


def _rights(role: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                yield f"{group}/{resource}", set(rule["verbs"])


def test_the_install_is_one_of_each_thing_it_takes(install: list[dict[str, Any]]) -> None:
    kinds = sorted(body["kind"] for body in install)
    assert kinds == sorted(
        ["Namespace", "CustomResourceDefinition", "ServiceAccount", "ConfigMap", "Deployment"]
        + ["ClusterRole"] * 3
        + ["ClusterRoleBinding", "Role", "RoleBinding"]
    )
    assert all(body["metadata"]["labels"]["app.kubernetes.io/part-of"] == "outrider" for body in install)


def test_everything_namespaced_is_in_the_namespace_it_brings(install: list[dict[str, Any]]) -> None:
    cluster_wide = {"Namespace", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}
    for body in install:
        if body["kind"] not in cluster_wide:
            assert body["metadata"]["namespace"] == _one(install, "Namespace")["metadata"]["name"]


def test_the_install_holds_the_generated_crd(install: list[dict[str, Any]]) -> None:
    assert _one(install, "CustomResourceDefinition")["spec"] == crd.definition()["spec"]


def test_the_operator_may_do_what_the_table_says_and_no_more(install: list[dict[str, Any]]) -> None:
    rights = list(_rights(_one(install, "ClusterRole", "outrider-operator")))
    assert dict(rights) == RIGHTS
    assert len(rights) == len(RIGHTS), "a resource is named twice"


def test_the_operator_may_watch_exactly_what_it_watches(install: list[dict[str, Any]]) -> None:
    role = _one(install, "ClusterRole", "outrider-operator")
    seen = {resource for resource, verbs in _rights(role) if {"list", "watch"} & verbs}
    assert seen == {f"{kind.group}/{kind.plural}" for kind in watched()}


def test_nothing_is_granted_by_wildcard(install: list[dict[str, Any]]) -> None:
    for body in install:
        for rule in body.get("rules", ()):
            assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]


def test_the_lease_alone_may_be_changed_in_the_operators_namespace(install: list[dict[str, Any]]) -> None:
    create, use = _one(install, "Role")["rules"]
    assert (create["resources"], create["verbs"]) == (["leases"], ["create"])
    lease = Settings.model_fields["lease_name"].default
    assert (use["resources"], use["resourceNames"], set(use["verbs"])) == (["leases"], [lease], {"get", "update"})


def test_both_roles_are_bound_to_the_operators_account(install: list[dict[str, Any]]) -> None:
    account = _one(install, "ServiceAccount")["metadata"]
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        binding = _one(install, kind)
        assert binding["roleRef"]["name"] == "outrider-operator"
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
        ]


def test_users_of_a_namespace_get_rights_on_its_models(install: list[dict[str, Any]]) -> None:
    view, edit = (_one(install, "ClusterRole", f"outrider-{role}") for role in ("view", "edit"))
    assert {verb for _, verbs in _rights(view) for verb in verbs} == {"get", "list", "watch"}
    assert "outrider.dev/speculativemodels/status" not in dict(_rights(edit)), "status is the operator's"


def test_the_operators_pod_meets_the_restricted_standard(install: list[dict[str, Any]]) -> None:
    pod = _one(install, "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert container["resources"]["limits"].keys() == {"memory"}, "a CPU limit only adds latency"


def test_probes_and_ports_are_where_the_operator_listens(install: list[dict[str, Any]]) -> None:
    (container,) = _one(install, "Deployment")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {name: Settings.model_fields[f"{name}_port"].default for name in ("health", "metrics")}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "health"}


def test_every_variable_is_a_setting_of_the_operator(install: list[dict[str, Any]]) -> None:
    (container,) = _one(install, "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = _one(install, "ConfigMap")
    assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    given = set(settings["data"]) | {variable["name"] for variable in container["env"]}
    assert given <= {f"OUTRIDER_{field.upper()}" for field in Settings.model_fields}


def test_images_and_settings_are_replaced_by_an_overlay(overlays: Path) -> None:
    objects = _with(
        overlays,
        "other-images",
        images=[{"name": "localhost/outrider-operator", "newName": "example.com/operator", "newTag": "v1"}],
        configMapGenerator=[
            {"name": "outrider-operator-settings", "behavior": "merge", "namespace": "outrider-system",
             "literals": ["OUTRIDER_RUNTIME_IMAGE=example.com/runtime:v1"]}
        ],
    )  # fmt: skip
    (container,) = _one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = _one(objects, "ConfigMap")
    assert container["image"] == "example.com/operator:v1"
    assert settings["data"] == {"OUTRIDER_RUNTIME_IMAGE": "example.com/runtime:v1"}
    assert container["envFrom"][0]["configMapRef"]["name"] == settings["metadata"]["name"]


def test_an_overlay_names_another_namespace_for_monitoring(overlays: Path) -> None:
    namespace = "/spec/ingress/0/from/0/namespaceSelector/matchLabels/kubernetes.io~1metadata.name"
    objects = _with(
        overlays,
        "monitored-elsewhere",
        components=["../components/network-policy"],
        configMapGenerator=[
            {"name": "outrider-operator-settings", "behavior": "merge", "namespace": "outrider-system",
             "literals": ["OUTRIDER_MONITORING_NAMESPACE=prometheus"]}
        ],
        patches=[
            {"target": {"kind": "NetworkPolicy"},
             "patch": json.dumps([{"op": "replace", "path": namespace, "value": "prometheus"}])}
        ],
    )  # fmt: skip
    assert _one(objects, "ConfigMap")["data"]["OUTRIDER_MONITORING_NAMESPACE"] == "prometheus"
    (peer,) = _one(objects, "NetworkPolicy")["spec"]["ingress"][0]["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "prometheus"}


def test_the_network_policy_lets_in_whom_the_setting_means_by_default(overlays: Path) -> None:
    objects = _with(overlays, "monitored", components=["../components/network-policy"])
    (peer,) = _one(objects, "NetworkPolicy")["spec"]["ingress"][0]["from"]
    default = Settings.model_fields["monitoring_namespace"].default
    assert _one(objects, "ConfigMap")["data"].get("OUTRIDER_MONITORING_NAMESPACE", default) == default
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": default}


def test_an_overlay_moves_all_of_it_to_another_namespace(overlays: Path) -> None:
    components = [f"../components/{name}" for name in COMPONENTS]
    objects = _with(overlays, "elsewhere", namespace="elsewhere", components=components)
    assert _one(objects, "Namespace")["metadata"]["name"] == "elsewhere"
    assert "outrider-system" not in json.dumps(objects), "the operator would have no rights there"


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_adds_to_the_install_and_takes_nothing_away(
    overlays: Path, install: list[dict[str, Any]], component: str
) -> None:
    def names(objects: list[dict[str, Any]]) -> set[tuple[str, str]]:
        return {(body["kind"], body["metadata"]["name"].split("-settings-")[0]) for body in objects}

    assert names(_with(overlays, f"with-{component}", components=[f"../components/{component}"])) >= names(install)


def test_all_components_together_make_two_guarded_watched_operators(overlays: Path) -> None:
    objects = _with(overlays, "with-all", components=[f"../components/{name}" for name in COMPONENTS])
    deployment = _one(objects, "Deployment")
    selector = deployment["spec"]["selector"]
    assert deployment["spec"]["replicas"] == 2
    assert _one(objects, "PodDisruptionBudget")["spec"]["selector"] == selector
    assert _one(objects, "NetworkPolicy")["spec"]["podSelector"] == selector
    assert _one(objects, "PodMonitor", "outrider-operator")["spec"]["selector"] == selector
    settings = _one(objects, "ConfigMap")["data"]
    assert settings["OUTRIDER_NETWORK_POLICY"] == "true"
    assert {f"OUTRIDER_{field.upper()}" for field in Settings.model_fields} >= settings.keys()
