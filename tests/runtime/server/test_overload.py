"""More than the server can do, from HTTP to the KV blocks of a real engine: waiting or a clear error, never a leak."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import aiohttp
import pytest
from tests.runtime.server.conftest import MODEL

from outrider_runtime.config import CacheConfig, EngineConfig, SchedulerConfig, SourceConfig, SpeculationConfig
from outrider_runtime.engine import process

CONTEXT = 128
SCHEDULER = SchedulerConfig(max_concurrency=64, max_batched_tokens=256)
LIMIT = SCHEDULER.max_concurrency + SCHEDULER.queue_limit


@pytest.fixture
async def served(serve, tiny_model_dir):
    """64 sequences at most, and blocks for a quarter of them at full length, so that requests are preempted too."""
    config = EngineConfig(
        SourceConfig(str(tiny_model_dir)),
        speculation=SpeculationConfig(method="ngram"),
        cache=CacheConfig(num_blocks=16 * CONTEXT // 16, block_size=16),
        scheduler=SCHEDULER,
        max_model_len=CONTEXT,
    )
    engine, ready = process.load(config, lambda message: None)
    return await serve(engine, ready=ready, scheduler=SCHEDULER)


async def _idle(served) -> None:
    """Nothing runs any more, and every block is free."""
    async with asyncio.timeout(60):
        while served.service.engine.stats.running or served.service.engine.stats.waiting:
            await asyncio.sleep(0.01)
    assert served.service.engine.in_flight == 0
    assert served.service.engine.stats.kv_cache_usage == 0


def _ask(number: int, **more) -> dict:
    return {"model": MODEL, "prompt": [2 + number % 200] * (1 + number % 40), "ignore_eos": True, **more}


@pytest.mark.timeout(240)
async def test_of_a_thousand_at_once_some_wait_the_others_are_told_to_come_back_and_every_block_is_free_after(served):
    url = served.api.make_url("/v1/completions")

    async def ask(number: int) -> tuple[int, int]:
        async with http.post(url, json=_ask(number, max_tokens=4, stream=number % 2 == 0)) as got:
            text = await got.text()
            if got.status == 429:
                assert int(got.headers["Retry-After"]) >= 1
                assert json.loads(text)["error"]["code"] == "rate_limit_exceeded"
            elif number % 2 == 0:
                assert text.endswith("data: [DONE]\n\n")
                assert '"finish_reason":"length"' in text
            else:
                assert json.loads(text)["usage"]["completion_tokens"] == 4
            return got.status, number

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        answers = await asyncio.gather(*(ask(number) for number in range(1000)))
    counts = Counter(status for status, _ in answers)
    assert set(counts) <= {200, 429}
    assert counts[200] >= LIMIT
    assert served.service.rejected == counts[429]
    await _idle(served)


@pytest.mark.timeout(240)
async def test_clients_that_leave_in_mid_stream_leave_no_block_behind(served):
    url = served.api.make_url("/v1/completions")

    async def leave(number: int) -> None:
        async with http.post(url, json=_ask(number, max_tokens=80, stream=True)) as got:
            assert got.status == 200
            for _ in range(number % 4):
                await got.content.readuntil(b"\n\n")
            got.close()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(leave(number) for number in range(150)))
        await _idle(served)
        async with http.post(url, json=_ask(1, max_tokens=2)) as got:
            assert (await got.json())["usage"]["completion_tokens"] == 2


OUT_OF_RANGE = [
    {"max_tokens": 10**30},
    {"max_tokens": CONTEXT},
    {"min_tokens": 5, "max_tokens": 4},
    {"min_tokens": 2**40},
    {"prompt": [5] * CONTEXT},
    {"prompt": [10**9]},
    {"prompt": [2**40]},
    {"prompt": []},
    {"temperature": 1e300},
    {"top_k": 2**31},
    {"top_p": 1e-400},
    {"seed": 2**64},
    {"stop_token_ids": [2**31]},
    {"logit_bias": {"99999999999999999999": 1}},
    {"n": 10**6},
]
EXTREMES = [
    {"temperature": 5e-324},
    {"temperature": 1e-30, "seed": 1},
    {"top_p": 5e-324},
    {"top_k": 2**31 - 1},
    {"min_p": 1.0},
    {"min_p": 5e-324},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 10, "presence_penalty": -2, "frequency_penalty": 2},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"logit_bias": {str(token): -100 for token in range(288)}},
    {"bad_words": ["a"] * 200},
    {"stop_token_ids": list(range(64)), "min_tokens": 3},
    {"n": 64},
    {"logprobs": 20, "n": 2},
    {"prompt": [5] * (CONTEXT - 3)},
]


@pytest.mark.timeout(240)
async def test_parameters_out_of_range_are_refused_and_extreme_ones_answered(served):
    for change in OUT_OF_RANGE:
        got = await served.api.post("/v1/completions", json=_ask(3, **change))
        assert got.status == 400, change
        error = (await got.json())["error"]
        named = "prompt" if error["code"] == "context_length_exceeded" else next(iter(change))
        assert error["param"] == named, change
    for change in EXTREMES:
        got = await served.api.post("/v1/completions", json=_ask(3, max_tokens=3, **change))
        body = await got.json()
        assert got.status == 200, (change, body)
        assert body["usage"]["completion_tokens"] <= 3 * change.get("n", 1)
        if "logprobs" in change:
            for columns in (choice["logprobs"] for choice in body["choices"]):
                assert len(columns["token_logprobs"]) == 3
                assert all(max(top.values()) <= 0 and len(top) > 1 for top in columns["top_logprobs"])
    await _idle(served)
