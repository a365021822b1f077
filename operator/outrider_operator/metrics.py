"""What Prometheus is told about the operator: every metric's name, once."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
        names = ["namespace", "name"]
        ready = GaugeMetricFamily("outrider_model_ready", "1 when condition Ready is True.", labels=names)
        replicas = GaugeMetricFamily("outrider_model_replicas", "Pods, by state.", labels=[*names, "state"])
        speculation = GaugeMetricFamily(
            "outrider_model_speculation", "1 for the state speculation is in.", labels=[*names, "state"]
        )
        for key in self._cache.models():
            entry = self._cache.get(MODEL, key)
            status = entry.body.get("status", {}) if entry else {}
            conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
            ready.add_metric([*key], conditions.get("Ready") == "True")
            for state, field in (("desired", "desiredReplicas"), ("current", "replicas"), ("ready", "readyReplicas")):
                replicas.add_metric([*key, state], status.get(field, 0))
            if state := status.get("speculativeDecoding", {}).get("state"):
                speculation.add_metric([*key, state], 1)
        yield from (ready, replicas, speculation)
