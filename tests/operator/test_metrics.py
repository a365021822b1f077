"""What Prometheus reads of the operator and of each object."""

from __future__ import annotations

from typing import Any

from prometheus_client import generate_latest

from outrider_operator.cache import Cache
from outrider_operator.metrics import Metrics
from outrider_operator.queue import Queue

STATUS = {
    "desiredReplicas": 3,
    "replicas": 3,
    "readyReplicas": 2,
    "speculativeDecoding": {
        "state": "Suspended",
        "reason": "Saturated",
        "runningConcurrency": "17.3",
        "acceptancePercent": 71,
        "speedup": "1.00",
    },
    "conditions": [{"type": "Ready", "status": "True", "reason": "Ready"}],
}


def _object(name: str, status: dict[str, Any], version: int = 1) -> dict[str, Any]:
    metadata = {"namespace": "team", "name": name, "uid": name, "resourceVersion": str(version)}
    return {"apiVersion": "outrider.dev/v1alpha1", "kind": "SpeculativeModel", "metadata": metadata, "status": status}


def _lines(cache: Cache) -> set[str]:
    text = generate_latest(Metrics(cache, Queue()).registry).decode()
    return {line for line in text.splitlines() if line.startswith("outrider_model_")}


async def test_an_object_is_told_in_numbers() -> None:
    cache = Cache()
    cache.put(_object("llama", STATUS))
    which = 'name="llama",namespace="team"'
    assert _lines(cache) == {
        f"outrider_model_ready{{{which}}} 1.0",
        f'outrider_model_replicas{{{which},state="desired"}} 3.0',
        f'outrider_model_replicas{{{which},state="current"}} 3.0',
        f'outrider_model_replicas{{{which},state="ready"}} 2.0',
        f"outrider_model_measurable{{{which}}} 1.0",
        f'outrider_model_speculation{{{which},reason="Saturated",state="Suspended"}} 1.0',
        f"outrider_model_running_requests{{{which}}} 17.3",
        f"outrider_model_acceptance_ratio{{{which}}} 0.71",
        f"outrider_model_speedup_ratio{{{which}}} 1.0",
    }


async def test_what_is_not_known_is_not_said_and_a_deleted_object_leaves_nothing() -> None:
    cache = Cache()
    body = _object("llama", {"conditions": [{"type": "ScalingActive", "reason": "MetricsUnavailable"}]})
    cache.put(body)
    lines = _lines(cache)
    assert 'outrider_model_measurable{name="llama",namespace="team"} 0.0' in lines
    assert not any("speculation" in line or "acceptance" in line for line in lines)
    cache.remove(_object("llama", {}, version=2))
    assert _lines(cache) == set()


async def test_the_operators_own_work_is_counted() -> None:
    metrics = Metrics(Cache(), Queue())
    metrics.decisions.labels("SpeculationSuspended").inc()
    metrics.reconcile.labels("done").observe(0.02)
    metrics.observe_request("apply", "ConfigMap", "200", 0.01)
    text = generate_latest(metrics.registry).decode()
    for line in (
        'outrider_decisions_total{reason="SpeculationSuspended"} 1.0',
        'outrider_reconcile_seconds_count{outcome="done"} 1.0',
        'outrider_api_requests_total{code="200",kind="ConfigMap",verb="apply"} 1.0',
        'outrider_api_request_seconds_count{verb="apply"} 1.0',
        "outrider_queue_depth 0.0",
        "outrider_queue_oldest_seconds 0.0",
    ):
        assert line in text.splitlines()
