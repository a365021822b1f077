"""What Prometheus is told about the operator: every metric's name, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider_operator.api.reasons import Reason
from outrider_operator.cache import Cache
from outrider_operator.kinds import MODEL
from outrider_operator.queue import Queue

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    def __init__(self, cache: Cache, queue: Queue) -> None:
        self.registry = CollectorRegistry()
        self.reconcile = Histogram(
            "outrider_reconcile_seconds",
            "Time to reconcile one object.",
            ["outcome"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.decisions = Counter(
            "outrider_decisions", "Transitions decided or seen, by event reason.", ["reason"], registry=self.registry
        )
        self.drift = Counter("outrider_children_applied", "Children that were sent.", registry=self.registry)
        self.measurements = Counter(
            "outrider_pod_measurements", "Pods read or told, by outcome.", ["outcome"], registry=self.registry
        )
        self.leader = Gauge("outrider_leader", "1 while this process may work.", registry=self.registry)
        self._requests = Counter(
            "outrider_api_requests", "Requests to the API server.", ["verb", "kind", "code"], registry=self.registry
        )
        self._request_seconds = Histogram(
            "outrider_api_request_seconds", "Their duration.", ["verb"], buckets=_SECONDS, registry=self.registry
        )
        depth = Gauge("outrider_queue_depth", "Objects waiting for a worker.", registry=self.registry)
        depth.set_function(queue.depth)
        oldest = Gauge(
            "outrider_queue_oldest_seconds", "The longest that one waits or is worked on.", registry=self.registry
        )
        oldest.set_function(queue.oldest)
        self.registry.register(_Models(cache))

    def observe_request(self, verb: str, kind: str, code: str, seconds: float) -> None:
        self._requests.labels(verb, kind, code).inc()
        self._request_seconds.labels(verb).observe(seconds)


class _Models(Collector):
    """The state of every object, read at scrape time, so that a deleted one leaves nothing behind."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        families = {name: GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in _OF_MODELS.items()}
        for key in self._cache.models():
            entry = self._cache.get(MODEL, key)
            for name, labels, value in _of_model(entry.body.get("status", {}) if entry else {}):
                families[name].add_metric([*key, *labels], value)
        yield from families.values()


_KEY = ("namespace", "name")
_OF_MODELS = {
    "outrider_model_ready": ("1 when condition Ready is True.", _KEY),
    "outrider_model_replicas": ("Pods, by state.", (*_KEY, "state")),
    "outrider_model_speculation": ("1 for the state speculation is in, and why.", (*_KEY, "state", "reason")),
    "outrider_model_measurable": ("1 while decisions are made, 0 while pods cannot be measured.", _KEY),
    "outrider_model_running_requests": ("Running requests per ready pod, as status has it.", _KEY),
    "outrider_model_acceptance_ratio": ("Accepted of the drafted tokens, as status has it.", _KEY),
    "outrider_model_speedup_ratio": ("Tokens per second over plain decoding, as status has it.", _KEY),
}
_REPLICAS = {"desired": "desiredReplicas", "current": "replicas", "ready": "readyReplicas"}
_NUMBERS = (
    ("outrider_model_running_requests", "runningConcurrency", 1.0),
    ("outrider_model_acceptance_ratio", "acceptancePercent", 0.01),
    ("outrider_model_speedup_ratio", "speedup", 1.0),
)


def _of_model(status: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Name, further labels and value of each sample of one object. What status does not say is not said."""
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    yield "outrider_model_ready", (), conditions.get("Ready", {}).get("status") == "True"
    for state, field in _REPLICAS.items():
        yield "outrider_model_replicas", (state,), status.get(field, 0)
    blind = any(each.get("reason") == Reason.METRICS_UNAVAILABLE for each in conditions.values())
    yield "outrider_model_measurable", (), not blind
    speculation = status.get("speculativeDecoding", {})
    if state := speculation.get("state"):
        yield "outrider_model_speculation", (state, speculation.get("reason", "")), 1
    for name, field, unit in _NUMBERS:
        with suppress(ValueError):  # not written by us
            if field in speculation:
                yield name, (), unit * float(speculation[field])
