"""SpeculativeModel on a real API server: what it accepts, refuses, fills in and shows."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from localcluster.api import APPLY_PATCH, MERGE_PATCH, poll
from localcluster.controlplane import ControlPlane
from localcluster.errors import ApiError, ClusterError
from tests.operator.api.objects import INVALID, UNKNOWN, UPDATES, VALID, Case, Update, model

from outrider_operator.api import crd

CRDS = Path(__file__).parents[2] / "crds" / crd.FILE
Kubectl = Callable[..., str]


@pytest.fixture(scope="session")
def established(control_plane: ControlPlane) -> ControlPlane:
    """The API server with the CRD installed and served."""
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    control_plane.kubectl("wait", "--for=condition=Established", f"crd/{crd.NAME}", "--timeout=20s")
    return control_plane


class Models:
    """SpeculativeModels of one namespace."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._api = plane.api
        self._path = f"/apis/outrider.dev/v1alpha1/namespaces/{namespace}/speculativemodels"

    def create(self, body: dict[str, Any], query: str = "") -> dict[str, Any]:
        return dict(self._api.request("POST", self._path + query, body))

    def get(self, name: str, subresource: str = "") -> dict[str, Any]:
        return dict(self._api.request("GET", f"{self._path}/{name}{subresource}"))

    def patch(self, name: str, body: Any, subresource: str = "", kind: str = MERGE_PATCH) -> dict[str, Any]:
        path = f"{self._path}/{name}{subresource}"
        if kind == APPLY_PATCH:
            path += "?fieldManager=test&force=true"
        return dict(self._api.request("PATCH", path, body, content_type=kind))

    def clear(self) -> None:
        self._api.request("DELETE", self._path)

    def replace(self, body: dict[str, Any]) -> dict[str, Any]:
        return dict(self._api.request("PUT", f"{self._path}/{body['metadata']['name']}", body))


@pytest.fixture(scope="module")
def namespace(established: ControlPlane) -> Iterator[str]:
    """One for this file: to make and end one takes longer than most tests here."""
    name = f"test-api-{uuid.uuid4().hex[:8]}"
    established.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    established.end_namespace(name)


@pytest.fixture
def models(established: ControlPlane, namespace: str) -> Iterator[Models]:
    """Those of the namespace, none at first."""
    models = Models(established, namespace)
    yield models
    models.clear()


# -- what it accepts and refuses -----------------------------------------------------------------------------------


def test_the_definition_is_established_without_a_complaint(established: ControlPlane) -> None:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd.NAME}"
    conditions = {c["type"]: c for c in established.api.request("GET", path)["status"]["conditions"]}
    assert conditions["Established"]["status"] == "True"
    assert "NonStructuralSchema" not in conditions


@pytest.mark.parametrize("case", VALID, ids=str)
def test_a_valid_object_is_accepted(models: Models, case: Case) -> None:
    created = models.create(case.body, "?fieldValidation=Strict&dryRun=All")
    for field, value in case.body["spec"].items():
        if not isinstance(value, dict):
            assert created["spec"][field] == value


@pytest.mark.parametrize("case", INVALID, ids=str)
def test_an_invalid_object_is_refused_where_it_is_wrong(models: Models, case: Case) -> None:
    with pytest.raises(ApiError) as refused:
        models.create(case.body, "?dryRun=All")
    assert refused.value.status == 422
    assert case.path in str(refused.value)
    assert case.message in str(refused.value)


@pytest.mark.parametrize("case", UNKNOWN, ids=str)
def test_an_unknown_field_is_dropped_unless_asked_to_be_strict(models: Models, case: Case) -> None:
    with pytest.raises(ApiError) as refused:
        models.create(case.body, "?fieldValidation=Strict&dryRun=All")
    assert refused.value.status == 400
    assert f'unknown field "{case.path}"' in str(refused.value)
    models.create(case.body)
    assert f'"{case.path.rpartition(".")[2]}"' not in json.dumps(models.get("qwen")["spec"])


def test_kubectl_refuses_an_unknown_field_by_itself(models: Models, namespace: str, kubectl: Kubectl) -> None:
    for case in UNKNOWN:
        with pytest.raises(ClusterError, match="unknown field"):
            kubectl("-n", namespace, "create", "-f", "-", input=json.dumps(case.body))


@pytest.mark.parametrize("case", UPDATES, ids=str)
def test_an_update_may_change_all_but_the_identity_of_the_cache(models: Models, case: Update) -> None:
    models.create(model(**case.before))
    body = models.get("qwen")
    body["spec"] = {**model()["spec"], **case.after}
    if not case.message:
        assert models.replace(body)["metadata"]["generation"] == 2
        return
    with pytest.raises(ApiError) as refused:
        models.replace(body)
    assert refused.value.status == 422
    assert case.message in str(refused.value)


# -- what it fills in ----------------------------------------------------------------------------------------------


def test_defaults_are_filled_in_where_somebody_would_look_for_them(models: Models) -> None:
    models.create(model())
    assert models.get("qwen")["spec"] == {
        "model": {"uri": "hf://Qwen/Qwen2.5-7B-Instruct"},
        "speculativeDecoding": {
            "mode": "Auto",
            "numSpeculativeTokens": 4,
            "saturation": {"stabilizationWindowSeconds": 30},
        },
        "engine": {
            "device": "CUDA",
            "tensorParallelSize": 1,
            "dtype": "Auto",
            "maxConcurrency": 256,
            "memoryUtilizationPercent": 90,
        },
        "replicas": 1,
        "rollout": {"drainTimeoutSeconds": 60, "progressDeadlineSeconds": 1800},
        "suspend": False,
    }


def test_a_new_object_says_that_nobody_has_looked_at_it(models: Models) -> None:
    models.create(model())
    assert models.get("qwen")["status"] == {"observedGeneration": -1}


def test_status_is_written_through_its_own_door_only(models: Models) -> None:
    models.create(model() | {"status": {"replicas": 7}})
    assert "replicas" not in models.get("qwen")["status"]
    condition = {"type": "Ready", "status": "True", "reason": "Ready", "lastTransitionTime": "2026-01-02T03:04:05Z"}
    status = {"observedGeneration": 1, "replicas": 2, "conditions": [condition]}
    models.patch("qwen", {"status": status, "spec": {"replicas": 5}}, "/status")
    after = models.get("qwen")
    assert after["status"] == status | {"conditions": [condition | {"message": ""}]}
    assert after["spec"]["replicas"] == 1
    assert after["metadata"]["generation"] == 1


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"conditions": [{"type": "Ready", "status": "Maybe"}]}, "Unsupported value"),
        ({"speculativeDecoding": {"state": "Resting"}}, "Unsupported value"),
        ({"speculativeDecoding": {"speedup": 2.31}}, "must be of type string"),
        ({"autoscaling": {"lastScaleTime": "yesterday"}}, "date-time"),
    ],
)
def test_a_status_that_is_wrong_is_refused(models: Models, status: dict[str, Any], message: str) -> None:
    models.create(model())
    with pytest.raises(ApiError, match=message):
        models.patch("qwen", {"status": status}, "/status")


def test_conditions_are_merged_by_type_on_server_side_apply(models: Models) -> None:
    models.create(model())

    def apply(*types: str) -> None:
        conditions = [
            {"type": t, "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"}
            for t in types
        ]
        identity = {"apiVersion": "outrider.dev/v1alpha1", "kind": "SpeculativeModel", "metadata": {"name": "qwen"}}
        models.patch("qwen", identity | {"status": {"conditions": conditions}}, "/status", APPLY_PATCH)

    apply("Ready", "Accepted", "Reconciling")
    apply("Accepted", "Ready")
    assert {c["type"] for c in models.get("qwen")["status"]["conditions"]} == {"Ready", "Accepted"}


# -- scale ---------------------------------------------------------------------------------------------------------


def test_scale_answers_before_anyone_set_replicas(models: Models, namespace: str, kubectl: Kubectl) -> None:
    models.create(model())
    scale = models.get("qwen", "/scale")
    assert scale["kind"] == "Scale"
    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 0}
    kubectl("-n", namespace, "scale", "specm/qwen", "--replicas=3")
    assert models.get("qwen")["spec"]["replicas"] == 3


def test_scale_shows_an_autoscaler_which_pods_it_scales(models: Models) -> None:
    models.create(model())
    models.patch("qwen", {"status": {"replicas": 2, "selector": "outrider.dev/model=qwen"}}, "/status")
    assert models.get("qwen", "/scale")["status"] == {"replicas": 2, "selector": "outrider.dev/model=qwen"}


def test_scale_keeps_to_the_bounds_of_replicas(models: Models) -> None:
    models.create(model())
    with pytest.raises(ApiError, match="less than or equal to 10000"):
        models.patch("qwen", {"spec": {"replicas": 10001}}, "/scale")


# -- what people see -----------------------------------------------------------------------------------------------

STATUS = {
    "observedGeneration": 1,
    "desiredReplicas": 3,
    "readyReplicas": 2,
    "url": "http://llama.test",
    "speculativeDecoding": {
        "state": "Active",
        "method": "DraftModel",
        "acceptancePercent": 71,
        "speedup": "2.31",
        "runningConcurrency": "4.5",
    },
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "reason": "Loading",
            "message": "1 of 3 replicas is loading weights",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }
    ],
}


def _table(text: str) -> list[dict[str, str]]:
    """kubectl's columns, split where the header's words begin."""
    header, *lines = text.splitlines()
    starts = [at for at, letter in enumerate(header) if letter != " " and (at == 0 or header[at - 1] == " ")]
    bounds = list(zip(starts, [*starts[1:], None], strict=True))
    return [{header[a:b].strip(): line[a:b].strip() for a, b in bounds} for line in lines]


def test_get_shows_state_at_a_glance(models: Models, namespace: str, kubectl: Kubectl) -> None:
    models.create(model(name="llama", speculativeDecoding={"draft": {"uri": "hf://meta-llama/Llama-3.2-1B"}}))
    models.patch("llama", {"status": STATUS}, "/status")
    (row,) = _table(kubectl("-n", namespace, "get", "specm"))
    assert row.pop("AGE")
    assert row == {
        "NAME": "llama",
        "READY": "False",
        "REASON": "Loading",
        "DESIRED": "3",
        "AVAILABLE": "2",
        "SPECULATION": "Active",
        "ACCEPT%": "71",
        "SPEEDUP": "2.31",
    }
    (wide,) = _table(kubectl("-n", namespace, "get", "specm", "-o", "wide"))
    assert {key: wide[key] for key in ("MODEL", "METHOD", "DRAFT", "RUNNING", "URL")} == {
        "MODEL": "hf://Qwen/Qwen2.5-7B-Instruct",
        "METHOD": "DraftModel",
        "DRAFT": "hf://meta-llama/Llama-3.2-1B",
        "RUNNING": "4.5",
        "URL": "http://llama.test",
    }


def test_every_name_of_the_kind_finds_it(models: Models, namespace: str, kubectl: Kubectl) -> None:
    models.create(model())
    for name in ("specm", "specmodel", "speculativemodel", "speculativemodels.outrider.dev", "outrider"):
        assert "speculativemodel.outrider.dev/qwen" in kubectl("-n", namespace, "get", name, "-o", "name")


def test_describe_shows_spec_and_conditions(models: Models, namespace: str, kubectl: Kubectl) -> None:
    models.create(model())
    models.patch("qwen", {"status": STATUS}, "/status")
    text = kubectl("-n", namespace, "describe", "specm", "qwen")
    for words in ("hf://Qwen/Qwen2.5-7B-Instruct", "1 of 3 replicas is loading weights", "Acceptance Percent:", "71"):
        assert words in text


def test_waiting_ends_when_ready_is_true(models: Models, namespace: str, kubectl: Kubectl) -> None:
    models.create(model())
    with pytest.raises(ClusterError, match="timed out"):
        kubectl("-n", namespace, "wait", "specm/qwen", "--for=condition=Ready", "--timeout=1s")
    ready = STATUS["conditions"][0] | {"status": "True", "reason": "Ready"}  # type: ignore[index]  # a literal above
    models.patch("qwen", {"status": {"observedGeneration": 1, "conditions": [ready]}}, "/status")
    assert "condition met" in kubectl("-n", namespace, "wait", "specm/qwen", "--for=condition=Ready", "--timeout=10s")


def test_explain_tells_what_a_field_is_for(established: ControlPlane) -> None:
    def explain(field: str) -> str:
        return established.kubectl("explain", field)

    assert poll(lambda: _succeeds(explain, "specm"), 20), "the schema is served a moment after the definition"
    text = explain("specm.spec.speculativeDecoding")
    for words in ("How tokens are drafted, and when not.", "numSpeculativeTokens", "enum: Auto, Enabled, Disabled"):
        assert words in text
    assert "The most tokens drafted per step" in explain("specm.spec.speculativeDecoding.numSpeculativeTokens")
    assert "OpenAI-compatible" in explain("specm")
    assert "Why, in one CamelCase word" in explain("specm.status.conditions.reason")


def _succeeds(kubectl: Kubectl, *arguments: str) -> bool:
    try:
        kubectl(*arguments)
    except ClusterError:
        return False
    return True


def test_delete_leaves_nothing_waiting(models: Models, namespace: str, kubectl: Kubectl) -> None:
    models.create(model())
    assert "deleted" in kubectl("-n", namespace, "delete", "specm", "qwen", "--timeout=10s")
    with pytest.raises(ApiError) as gone:
        models.get("qwen")
    assert gone.value.status == 404


def test_apply_again_changes_nothing_and_keeps_an_autoscalers_replicas(
    models: Models, namespace: str, kubectl: Kubectl
) -> None:
    text = json.dumps(model())
    kubectl("-n", namespace, "apply", "-f", "-", input=text)
    kubectl("-n", namespace, "scale", "specm/qwen", "--replicas=5")
    assert "unchanged" in kubectl("-n", namespace, "apply", "-f", "-", input=text)
    assert models.get("qwen")["spec"]["replicas"] == 5
