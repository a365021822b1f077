"""The pod: locked down, given time to load and to drain, with its folders where the runtime looks for them."""

from __future__ import annotations

import pytest
from tests.operator.build import model

from outrider_operator.render.pod import pod_template


def _pod(*parts):
    target = model(*parts)
    return pod_template(target, target.spec, "i:1", 4)["spec"]


def _server(*parts):
    [server] = _pod(*parts)["containers"]
    return server


def _volumes(*parts):
    return {volume.pop("name"): volume for volume in _pod(*parts)["volumes"]}


def test_a_pod_may_do_nothing_it_does_not_need():
    pod, server = _pod(), _server()
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_what_the_runtime_writes_to_is_writable():
    mounts = {mount["mountPath"]: mount["name"] for mount in _server()["volumeMounts"]}
    for path in ("/var/cache/outrider", "/tmp", "/dev/shm"):
        assert "emptyDir" in _volumes()[mounts[path]]
    assert _volumes()["shm"]["emptyDir"] == {"medium": "Memory"}


def test_the_admin_token_is_a_whole_folder_so_that_a_new_one_arrives():
    [mount] = [m for m in _server()["volumeMounts"] if m["name"] == "admin"]
    assert "subPath" not in mount
    assert mount["readOnly"] is True
    assert _volumes()["admin"]["secret"]["secretName"] == "llama-admin"
    args = _server()["args"]
    assert args[args.index("--admin-token-file") + 1] == f"{mount['mountPath']}/token"


def test_a_leaving_pod_serves_on_then_drains_and_has_the_time_for_both():
    assert _server()["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert _pod({"rollout": {"drainTimeoutSeconds": 90}})["terminationGracePeriodSeconds"] == 5 + 90 + 10


def test_probes_wait_for_large_models_and_slow_answers():
    server = _server()
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600
    assert {server[f"{kind}Probe"]["timeoutSeconds"] for kind in ("startup", "readiness", "liveness")} == {5}
    assert server["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "admin"}
    assert server["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "admin"}
    assert {port["name"]: port["containerPort"] for port in server["ports"]} == {"http": 8000, "admin": 8001}


@pytest.mark.parametrize(
    ("parts", "limits"),
    [
        ({}, {"nvidia.com/gpu": "1"}),
        ({"resources": {"limits": {"cpu": 4}}}, {"cpu": "4", "nvidia.com/gpu": "1"}),
        ({"resources": {"limits": {"nvidia.com/gpu": 2}}}, {"nvidia.com/gpu": "2"}),
        ({"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}, {"nvidia.com/mig-1g.10gb": "1"}),
        ({"engine": {"device": "CPU"}, "resources": {"limits": {"cpu": "500m"}}}, {"cpu": "500m"}),
        ({"engine": {"device": "CPU"}}, None),
    ],
    ids=str,
)
def test_a_gpu_is_asked_for_unless_resources_say_otherwise(parts, limits):
    assert _server(parts)["resources"].get("limits") == limits


def test_claims_with_weights_are_read_only_where_the_runtime_expects_them():
    parts = {"model": {"uri": "pvc://big.claim/a"}, "speculativeDecoding": {"draft": {"uri": "pvc://small/b"}}}
    mounts = {m["mountPath"]: m for m in _server(parts)["volumeMounts"]}
    volumes = _volumes(parts)
    for claim in ("big.claim", "small"):
        mount = mounts[f"/mnt/models/{claim}"]
        assert mount["readOnly"] is True
        assert volumes[mount["name"]] == {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        (None, {"emptyDir": {}}),
        ({"emptyDir": {"sizeLimit": "50Gi"}}, {"emptyDir": {"sizeLimit": "50Gi"}}),
        ({"claimName": "shared"}, {"persistentVolumeClaim": {"claimName": "shared"}}),
        ({"size": "100Gi"}, {"persistentVolumeClaim": {"claimName": "llama-cache"}}),
    ],
    ids=str,
)
def test_downloads_go_where_the_cache_is(cache, volume):
    assert _volumes({"cache": cache} if cache else {})["cache"] == volume


def test_placement_is_passed_on_as_given_and_left_out_when_empty():
    given = {
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "tolerationSeconds": 5}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "serviceAccountName": "models",
        "imagePullSecrets": [{"name": "registry"}],
    }
    pod = _pod(given)
    assert {name: pod[name] for name in given} == given
    assert not set(given) & set(_pod())
