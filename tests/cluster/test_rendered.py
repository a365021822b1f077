"""What is rendered, before a real API server: every field is known to it, every value valid, and all of it is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.build import DRAFTED, model, observed

from outrider_operator.drift import differences
from outrider_operator.plan import Defaults, plan
from outrider_operator.render.secret import admin_secret

EVERYTHING = {
    "model": {"uri": "pvc://weights/target", "name": "chat"},
    "speculativeDecoding": {"draft": {"uri": "pvc://drafts/small"}},
    "engine": {
        "device": "CPU",
        "apiKeySecretRef": {"name": "api", "key": "k"},
        "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    },
    "cache": {"size": "1Gi", "storageClassName": "fast"},
    "resources": {"requests": {"cpu": "250m"}, "limits": {"cpu": 2, "memory": "6Gi"}},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "imagePullSecrets": [{"name": "registry"}],
    "rollout": {"maxSurge": "25%", "maxUnavailable": 0},
    "podTemplate": {
        "metadata": {"annotations": {"team": "a"}},
        "spec": {
            "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["hub"]}],
            "containers": [{"name": "sidecar", "image": "s"}],
        },
    },
}


@pytest.mark.parametrize(
    "parts",
    [{}, DRAFTED, EVERYTHING, {"suspend": True, "cache": {"emptyDir": {"sizeLimit": "5Gi"}}}],
    ids=("smallest", "drafted", "everything", "suspended"),
)
def test_the_api_server_takes_every_field_and_keeps_it(
    namespace: str, kubectl: Callable[..., str], parts: dict[str, Any], tmp_path: Any
) -> None:
    seen = observed(parts, model=replace(model(parts), namespace=namespace))
    planned = plan(seen, Defaults("outrider-runtime:1", network_policy=True))
    assert planned.refusal is None
    children = [admin_secret(seen.model), *planned.children]
    file = tmp_path / "children.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": children}))
    applied = kubectl(
        *("apply", "--server-side", "--field-manager=outrider-operator", "--validate=strict"),
        *("-n", namespace, "-f", str(file), "-o", "json"),
    )
    for child, kept in zip(children, json.loads(applied)["items"], strict=True):
        assert differences(child, kept) == [], child["kind"]
