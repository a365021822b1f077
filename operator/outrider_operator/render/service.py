"""Service NAME: where clients of the OpenAI API go."""

from __future__ import annotations

from typing import Any

from outrider_operator.observe import Model
from outrider_operator.render.meta import metadata, selector

PORT = 80


def service(model: Model) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(model, model.name),
        "spec": {
            "selector": selector(model.name),
            "ports": [{"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def url(model: Model) -> str:
    return f"http://{model.name}.{model.namespace}.svc"
