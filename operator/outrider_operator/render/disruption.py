"""PodDisruptionBudget NAME: a node drain takes one replica at a time, and a broken pod never blocks it."""

from __future__ import annotations

from typing import Any

from outrider_operator.observe import Model
from outrider_operator.render.meta import metadata, selector


def disruption_budget(model: Model) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(model, model.name),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(model.name)},
        },
    }
