from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from aiohttp import web

from outrider_operator import health
from outrider_operator.cache import Cache
from outrider_operator.metrics import Metrics
from outrider_operator.queue import Queue

MODEL = {
    "apiVersion": "outrider.dev/v1alpha1",
    "kind": "SpeculativeModel",
    "metadata": {"namespace": "team", "name": "llama", "uid": "u1", "resourceVersion": "1"},
    "status": {
        "desiredReplicas": 3,
        "readyReplicas": 2,
        "speculativeDecoding": {"state": "Suspended"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}


@pytest.fixture
async def get() -> AsyncIterator[Callable[[web.Application, str], object]]:
    runners: list[web.AppRunner] = []

    async def ask(application: web.Application, path: str) -> tuple[int, str]:
        runner = await health.serve(application, "127.0.0.1", 0)
        runners.append(runner)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{runner.addresses[0][1]}{path}") as answer,
        ):
            return answer.status, await answer.text()

    yield ask
    for runner in runners:
        await runner.cleanup()


async def test_health_is_good_while_every_check_is_silent(get) -> None:
    status, _ = await get(health.health({"queue": lambda: ""}), "/healthz")
    assert status == 200


async def test_health_is_bad_and_says_why_when_a_check_speaks(get) -> None:
    checks = {"queue": lambda: "", "watches": lambda: "nothing could be listed for 2000 s"}
    status, text = await get(health.health(checks), "/healthz")
    assert status == 503
    assert "nothing could be listed" in text


async def test_metrics_tell_requests_queue_and_the_state_of_every_object(get) -> None:
    cache, queue = Cache(), Queue()
    metrics = Metrics(cache, queue)
    metrics.observe_request("apply", "Service", "200", 0.01)
    cache.put(MODEL)
    _, text = await get(health.exposition(metrics.registry), "/metrics")
    assert 'outrider_api_requests_total{code="200",kind="Service",verb="apply"} 1.0' in text
    assert "outrider_queue_depth 0.0" in text
    assert 'outrider_model_ready{name="llama",namespace="team"} 1.0' in text
    assert 'outrider_model_replicas{name="llama",namespace="team",state="ready"} 2.0' in text
    assert 'outrider_model_speculation{name="llama",namespace="team",reason="",state="Suspended"} 1.0' in text


async def test_a_deleted_object_leaves_no_series_behind(get) -> None:
    cache = Cache()
    metrics = Metrics(cache, Queue())
    cache.put(MODEL)
    cache.remove(MODEL)
    _, text = await get(health.exposition(metrics.registry), "/metrics")
    assert "llama" not in text
