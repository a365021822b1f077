"""The pod template: one locked-down container that serves, and the volumes it needs."""

from __future__ import annotations

from typing import Any

from outrider_operator import labels
from outrider_operator.api.schema import ApiModel
from outrider_operator.api.v1alpha1 import Device, SpeculativeModelSpec
from outrider_operator.engine import (
    ADMIN_DIR,
    ADMIN_PORT,
    CACHE_DIR,
    CLAIMS_DIR,
    CONTAINER,
    PORT,
    arguments,
    claims,
    environment,
)
from outrider_operator.observe import Model
from outrider_operator.render.meta import admin_name, cache_name
from outrider_operator.render.secret import TOKEN_KEY

USER = 65532  # the images' own; numeric, so that runAsNonRoot can be checked without the image
ENDPOINTS_SECONDS = 5  # a leaving pod serves on until every node has heard that it leaves
SHUTDOWN_SECONDS = 10  # from the end of the drain to the end of the process
STARTUP_SECONDS = 2 * 3600  # 140 GB at 20 MB/s
STARTUP_PERIOD = 2
PROBE_TIMEOUT = 5


def pod_template(model: Model, spec: SpeculativeModelSpec, image: str, tier: int) -> dict[str, Any]:
    """The template before the user's podTemplate is merged over it, without its hash."""
    template_spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": ENDPOINTS_SECONDS + spec.rollout.drain_timeout_seconds + SHUTDOWN_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_server(model, spec, image, tier)],
        "volumes": _volumes(model, spec),
        **_placement(spec),
    }
    return {"metadata": {"labels": labels.common(model.name)}, "spec": template_spec}


def _server(model: Model, spec: SpeculativeModelSpec, image: str, tier: int) -> dict[str, Any]:
    mounts = [
        {"name": "cache", "mountPath": CACHE_DIR},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "admin", "mountPath": ADMIN_DIR, "readOnly": True},
    ]
    for number, claim in enumerate(claims(spec)):
        mounts.append({"name": _weights(number), "mountPath": f"{CLAIMS_DIR}/{claim}", "readOnly": True})
    return {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": arguments(model, spec, tier),
        "env": environment(model, spec),
        "ports": [
            {"name": "http", "containerPort": PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(spec),
        "startupProbe": _probe("/readyz", STARTUP_PERIOD, STARTUP_SECONDS // STARTUP_PERIOD),
        "readinessProbe": _probe("/readyz", 5, 2),
        "livenessProbe": _probe("/healthz", 10, 6),
        "lifecycle": {"preStop": {"sleep": {"seconds": ENDPOINTS_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _probe(path: str, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "admin"},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": PROBE_TIMEOUT,
    }


def _resources(spec: SpeculativeModelSpec) -> dict[str, Any]:
    requests = {name: str(value) for name, value in spec.resources.requests.items()}
    limits = {name: str(value) for name, value in spec.resources.limits.items()}
    named = any(name.startswith("nvidia.com/") for name in (*requests, *limits))
    if spec.engine.device is Device.CUDA and not named:
        limits["nvidia.com/gpu"] = str(spec.engine.tensor_parallel_size)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _volumes(model: Model, spec: SpeculativeModelSpec) -> list[dict[str, Any]]:
    token = {"secretName": admin_name(model.name), "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}]}
    volumes: list[dict[str, Any]] = [
        {"name": "cache", **_cache(model, spec)},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "admin", "secret": token},
    ]
    for number, claim in enumerate(claims(spec)):
        # read-only at the source too: nobody changes the owner of 140 GB of files that are only read
        source = {"claimName": claim, "readOnly": True}
        volumes.append({"name": _weights(number), "persistentVolumeClaim": source})
    return volumes


def _weights(number: int) -> str:
    return "weights" if number == 0 else f"weights-{number}"


def _cache(model: Model, spec: SpeculativeModelSpec) -> dict[str, Any]:
    cache = spec.cache
    if cache is not None and cache.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    if cache is not None and cache.size is not None:
        return {"persistentVolumeClaim": {"claimName": cache_name(model.name)}}
    limit = cache.empty_dir.size_limit if cache is not None and cache.empty_dir is not None else None
    return {"emptyDir": {} if limit is None else {"sizeLimit": str(limit)}}


def _placement(spec: SpeculativeModelSpec) -> dict[str, Any]:
    """Fields that are core/v1's own, passed on as given; empty ones are left out."""
    fields: dict[str, Any] = {
        "nodeSelector": dict(spec.node_selector),
        "tolerations": [_plain(toleration) for toleration in spec.tolerations],
        "affinity": spec.affinity,
        "topologySpreadConstraints": list(spec.topology_spread_constraints),
        "priorityClassName": spec.priority_class_name,
        "runtimeClassName": spec.runtime_class_name,
        "serviceAccountName": spec.service_account_name,
        "imagePullSecrets": [_plain(secret) for secret in spec.image_pull_secrets],
    }
    return {name: value for name, value in fields.items() if value}


def _plain(value: ApiModel) -> dict[str, Any]:
    return value.model_dump(by_alias=True, exclude_none=True, mode="json")
