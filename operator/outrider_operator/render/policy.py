"""ConfigMap NAME-policy: the truth about speculation. Pods read `policy` at start, the operator keeps `memory`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider_operator.fleet.policy import Memory, Policy
from outrider_operator.observe import Model
from outrider_operator.render.meta import metadata, policy_name

POLICY_KEY = "policy"
MEMORY_KEY = "memory"


def policy_config_map(model: Model, policy: Policy, memory: Memory) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(model, policy_name(model.name)),
        "data": {
            POLICY_KEY: json.dumps(policy.to_json(), sort_keys=True),
            MEMORY_KEY: json.dumps(memory.to_json(), sort_keys=True),
        },
    }


def remembered(config_map: Mapping[str, Any] | None) -> Memory:
    """The memory in a ConfigMap. One that is missing or that somebody broke is a fresh start, never a failure."""
    try:
        return Memory.from_json(json.loads((config_map or {})["data"][MEMORY_KEY]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return Memory()
