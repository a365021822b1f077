"""Argo CD's health check, run in the language it is written in, over the states a SpeculativeModel goes through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import LuaRuntime

CONFIG = Path(__file__).parents[2] / "manifests" / "gitops" / "argocd-health.yaml"


def _health(body: dict[str, Any]) -> tuple[str, str]:
    script = yaml.safe_load(CONFIG.read_text())["data"]["resource.customizations.health.outrider.dev_SpeculativeModel"]
    lua = LuaRuntime(register_eval=False)
    result = lua.eval(f"function(obj) {script} end")(lua.table_from(body, recursive=True))
    return result["status"], result["message"]


def _condition(kind: str, status: str, reason: str, message: str = "in words") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def _object(*conditions: dict[str, str], observed: int = 2) -> dict[str, Any]:
    status: dict[str, Any] = {"observedGeneration": observed}
    return {"metadata": {"generation": 2}, "status": status | ({"conditions": list(conditions)} if conditions else {})}


READY = _condition("Ready", "True", "Ready")


@pytest.mark.parametrize(
    ("body", "health", "words"),
    [
        ({"metadata": {"generation": 1}}, "Progressing", "this generation"),
        (_object(observed=-1), "Progressing", "this generation"),
        (_object(READY, observed=1), "Progressing", "this generation"),
        (_object(), "Progressing", "first status"),
        (_object(_condition("Ready", "False", "Loading")), "Progressing", "Loading: in words"),
        (_object(_condition("Ready", "Unknown", "Pending", "")), "Progressing", "Pending: "),
        (_object(READY), "Healthy", "Ready: in words"),
        (_object(_condition("Ready", "True", "Suspended")), "Healthy", "Suspended"),
        (_object(READY, _condition("Accepted", "True", "Accepted")), "Healthy", "Ready"),
        (
            _object(_condition("Ready", "False", "NameConflict"), _condition("Accepted", "False", "NameConflict")),
            "Degraded",
            "NameConflict: in words",
        ),
        (
            _object(_condition("Stalled", "True", "ProgressDeadlineExceeded"), _condition("Ready", "False", "Loading")),
            "Degraded",
            "ProgressDeadlineExceeded",
        ),
    ],
)
def test_health_follows_the_conditions(body: dict[str, Any], health: str, words: str) -> None:
    status, message = _health(body)
    assert status == health
    assert words in message
