"""The other children: owned by the model, named after it, reachable as the design says."""

from __future__ import annotations

import json

import pytest
from tests.operator.build import DEFAULTS, model, observed

from outrider_operator import labels
from outrider_operator.api.reasons import SpeculationState
from outrider_operator.fleet.policy import Memory
from outrider_operator.plan import Defaults, plan
from outrider_operator.render.cache import cache_claim
from outrider_operator.render.policy import policy_config_map, remembered
from outrider_operator.render.secret import admin_secret

GUARDED = Defaults("runtime:1", network_policy=True, operator_namespace="ops", monitoring_namespace="watch")
OWNED = {"cache": {"size": "100Gi", "retain": False}}
KEPT = {"cache": {"size": "100Gi", "storageClassName": "fast"}}


def _children(*parts, defaults=GUARDED):
    return {c["kind"]: c for c in plan(observed(*parts), defaults).children}


def test_children_come_in_the_order_in_which_they_need_each_other():
    assert list(_children(KEPT)) == [
        "ConfigMap",
        "PersistentVolumeClaim",
        "Deployment",
        "Service",
        "PodDisruptionBudget",
        "NetworkPolicy",
    ]
    assert list(_children(defaults=DEFAULTS)) == ["ConfigMap", "Deployment", "Service", "PodDisruptionBudget"]


def test_each_child_is_owned_labelled_and_hashed():
    for child in (*_children(OWNED).values(), admin_secret(model())):
        metadata = child["metadata"]
        assert metadata["namespace"] == "team"
        assert metadata["labels"]["outrider.dev/model"] == "llama"
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == labels.FIELD_MANAGER
        [owner] = metadata["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("SpeculativeModel", "llama", "uid-1")
        assert owner["controller"] is True
        assert owner["blockOwnerDeletion"] is True
        assert "finalizers" not in metadata
        assert child["kind"] == "Secret" or metadata["annotations"][labels.HASH]


def test_a_claim_without_owner_does_not_pass_for_a_part_of_an_argo_application_of_the_models_name():
    kept = _children({"cache": {"size": "1Gi"}})["PersistentVolumeClaim"]["metadata"]
    assert "ownerReferences" not in kept
    assert "app.kubernetes.io/instance" not in kept["labels"]
    assert kept["labels"]["outrider.dev/model"] == "llama"
    assert _children()["Service"]["metadata"]["labels"]["app.kubernetes.io/instance"] == "llama"


def test_the_secrets_data_is_nobodys_business_here():
    secret = admin_secret(model())
    assert secret["metadata"]["name"] == "llama-admin"
    assert not {"data", "stringData"} & set(secret)


def test_the_service_sends_port_80_to_the_api():
    service = _children()["Service"]
    assert service["metadata"]["name"] == "llama"
    assert service["spec"]["selector"] == {"outrider.dev/model": "llama"}
    [port] = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (80, "http")


def test_a_drain_takes_one_pod_at_a_time_and_broken_ones_at_once():
    spec = _children()["PodDisruptionBudget"]["spec"]
    assert spec["maxUnavailable"] == 1
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert spec["selector"] == {"matchLabels": {"outrider.dev/model": "llama"}}


def test_the_admin_port_is_open_to_the_operator_and_monitoring_alone():
    everybody, admins = _children()["NetworkPolicy"]["spec"]["ingress"]
    assert [port["port"] for port in everybody["ports"]] == [8000]
    assert "from" not in everybody
    assert [port["port"] for port in admins["ports"]] == [8001]
    names = [peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for peer in admins["from"]]
    assert names == ["ops", "watch"]


def test_a_retained_claim_has_no_owner_so_that_it_survives_the_model():
    assert "ownerReferences" not in _children(KEPT)["PersistentVolumeClaim"]["metadata"]
    assert (
        "ownerReferences" not in _children({"cache": {"size": 1, "retain": True}})["PersistentVolumeClaim"]["metadata"]
    )
    assert _children(OWNED)["PersistentVolumeClaim"]["metadata"]["ownerReferences"]


@pytest.mark.parametrize(
    ("parts", "modes"),
    [
        ({}, ["ReadWriteOnce"]),
        ({"replicas": 2}, ["ReadWriteMany"]),
        ({"autoscaling": {"maxReplicas": 3, "targetConcurrency": 4}}, ["ReadWriteMany"]),
    ],
    ids=str,
)
def test_a_claim_is_made_for_as_many_nodes_as_there_may_be(parts, modes):
    claim = _children(KEPT, parts)["PersistentVolumeClaim"]["spec"]
    assert claim["accessModes"] == modes
    assert claim["storageClassName"] == "fast"
    assert claim["resources"] == {"requests": {"storage": "100Gi"}}


def test_a_claims_access_modes_stay_as_created_because_they_cannot_change():
    target = model(KEPT, {"replicas": 3})
    live = {"spec": {"accessModes": ["ReadWriteOnce"]}}
    assert cache_claim(target, target.spec, target.spec.cache, live)["spec"]["accessModes"] == ["ReadWriteOnce"]


@pytest.mark.parametrize(
    ("there", "asked"),
    [("200Gi", "200Gi"), ("0.2Ti", "0.2Ti"), ("102400Mi", "100Gi"), ("50Gi", "100Gi"), (None, "100Gi")],
)
def test_a_claim_that_somebody_made_larger_stays_so_because_it_cannot_shrink(there, asked):
    target = model(KEPT)
    live = {"spec": {"resources": {"requests": {"storage": there} if there else {}}}}
    claim = cache_claim(target, target.spec, target.spec.cache, live)["spec"]
    assert claim["resources"] == {"requests": {"storage": asked}}


def test_the_policy_and_what_is_remembered_stand_side_by_side():
    planned = plan(observed({"speculativeDecoding": {"minAcceptancePercent": 40}}), DEFAULTS)
    config_map = {c["kind"]: c for c in planned.children}["ConfigMap"]
    assert config_map["metadata"]["name"] == "llama-policy"
    assert json.loads(config_map["data"]["policy"]) == planned.policy.to_json()
    assert remembered(config_map) == planned.memory


def test_memory_survives_the_config_map_and_a_broken_one_is_a_fresh_start():
    memory = Memory(SpeculationState.SUSPENDED, "Saturated", since=5.0, attempts=2, disable_at=16.0)
    policy = plan(observed(), DEFAULTS).policy
    assert remembered(policy_config_map(model(), policy, memory)) == memory
    for broken in (None, {}, {"data": None}, {"data": {"memory": "{"}}, {"data": {"memory": '{"state": "Odd"}'}}):
        assert remembered(broken) == Memory()
    assert remembered({"data": {"memory": "[]"}}) == Memory()
    for endless in ('{"attempts": 1e999}', '{"since": 1' + "0" * 400 + "}", "[" * 100_000):
        assert remembered({"data": {"memory": endless}}) == Memory()
