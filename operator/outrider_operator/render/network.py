"""NetworkPolicy NAME: everybody may ask the model, only the operator and monitoring may reach the admin port."""

from __future__ import annotations

from typing import Any

from outrider_operator.engine import ADMIN_PORT, PORT
from outrider_operator.observe import Model
from outrider_operator.render.meta import metadata, selector

_NAMESPACE = "kubernetes.io/metadata.name"  # set by the API server on every namespace


def network_policy(model: Model, admin_namespaces: tuple[str, ...]) -> dict[str, Any]:
    admins = sorted(set(admin_namespaces))
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(model, model.name),
        "spec": {
            "podSelector": {"matchLabels": selector(model.name)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"port": PORT, "protocol": "TCP"}]},
                {
                    "ports": [{"port": ADMIN_PORT, "protocol": "TCP"}],
                    "from": [{"namespaceSelector": {"matchLabels": {_NAMESPACE: name}}} for name in admins],
                },
            ],
        },
    }
