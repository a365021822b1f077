"""Every metric's name, once. Suffixes are the field's, so that dashboards for other engines fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from outrider_runtime.engine.messages import EngineStats

PREFIX = "outrider:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# attribute of EngineStats, name (counters get _total), help
_COUNTERS = (
    ("drafts", "spec_decode_num_drafts", "Verifications of at least one drafted token."),
    ("draft_tokens", "spec_decode_num_draft_tokens", "Tokens drafted."),
    ("accepted_tokens", "spec_decode_num_accepted_tokens", "Drafted tokens accepted."),
    ("generated_tokens", "generation_tokens", "Tokens generated."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens read."),
    ("running_request_seconds", "running_request_seconds", "Integral of running requests over time."),
    ("waiting_request_seconds", "waiting_request_seconds", "Integral of waiting requests over time."),
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
)
_GAUGES = (
    ("running", "num_requests_running", "Requests in the batch."),
    ("waiting", "num_requests_waiting", "Requests waiting for a place in the batch."),
    ("kv_cache_usage", "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."),
    ("break_even_concurrency", "speculation_break_even_concurrency", "Batch at which drafting stops to pay."),
    ("speedup", "speculation_speedup", "Tokens per second over plain decoding at the same batch."),
)
_PER_POSITION = ("spec_decode_num_accepted_tokens_per_pos", "Drafts whose token at this position was accepted.")
_EFFECTIVE = ("speculation_effective_tokens", "Draft length in force.")
_STATE = ("speculation_state", "1 for the state of speculation that is in force.")
_REJECTED = ("num_requests_rejected", "Requests answered with 429.")

_FIRST_TOKEN = ("time_to_first_token_seconds", "From a request's arrival to its first token.")
_INTER_TOKEN = ("inter_token_latency_seconds", "Between two tokens of a request.")
_WHOLE = ("e2e_request_latency_seconds", "From a request's arrival to its end.")
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_FAST = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)


class Histogram:
    """Counts by upper bound; observing many equal values costs as much as one."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        bounds = [*map(str, self._bounds), "+Inf"]
        cumulative = [*zip(bounds, map(float, accumulate(self._counts)), strict=True)]
        return HistogramMetricFamily(PREFIX + name, documentation, buckets=cumulative, sum_value=self._sum)


@dataclass(frozen=True, slots=True)
class Latencies:
    """As a client sees them, in seconds."""

    first_token: Histogram = field(default_factory=lambda: Histogram(_SLOW))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_FAST))
    whole: Histogram = field(default_factory=lambda: Histogram(_SLOW))


@dataclass(frozen=True, slots=True)
class Snapshot:
    stats: EngineStats
    state: str
    reason: str
    effective_tokens: float
    rejected: int
    latencies: Latencies


def render(snapshot: Snapshot) -> bytes:
    """Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(snapshot))
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot
        for attribute, name, text in _COUNTERS:
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(now.stats, attribute))
        yield CounterMetricFamily(PREFIX + _REJECTED[0], _REJECTED[1], value=now.rejected)
        positions = CounterMetricFamily(PREFIX + _PER_POSITION[0], _PER_POSITION[1], labels=["position"])
        for position, count in enumerate(now.stats.accepted_per_position):
            positions.add_metric([str(position)], count)
        yield positions
        for attribute, name, text in _GAUGES:
            value = getattr(now.stats, attribute)
            if value is not None:  # not known yet
                yield GaugeMetricFamily(PREFIX + name, text, value=value)
        yield GaugeMetricFamily(PREFIX + _EFFECTIVE[0], _EFFECTIVE[1], value=now.effective_tokens)
        state = GaugeMetricFamily(PREFIX + _STATE[0], _STATE[1], labels=["state", "reason"])
        state.add_metric([now.state, now.reason], 1)
        yield state
        yield now.latencies.first_token.family(*_FIRST_TOKEN)
        yield now.latencies.inter_token.family(*_INTER_TOKEN)
        yield now.latencies.whole.family(*_WHOLE)
