"""Reading pods over real HTTP: those that answer, and every way in which a pod may not."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.operator.build import pod

from outrider_operator.api.reasons import SpeculationState
from outrider_operator.errors import Rejected, Unavailable
from outrider_operator.fleet import measure
from outrider_operator.fleet.measure import put_policy, read_pods
from outrider_operator.fleet.policy import Policy

CONTRACT = Path(__file__).parents[2] / "contract" / "speculation"
ACTIVE, SUSPENDED, WITHOUT_TOKEN, BAD_MODE = (
    json.loads((CONTRACT / f"{name}.json").read_text())
    for name in ("get-active", "put-suspended", "put-without-token", "put-bad-mode")
)
POLICY = Policy("Auto", SpeculationState.SUSPENDED, "Saturated", 4, None, revision="c41b9e07")
HERE = pod("here", ip="127.0.0.1")


class Runtime:
    """A pod's admin port that answers as it is told to."""

    def __init__(self, respond):
        self.respond, self.requests, self.at_once, self.most_at_once = respond, [], 0, 0

    async def handle(self, request):
        self.requests.append((request.method, request.headers.get("Authorization"), await request.text()))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self.respond(request)
        finally:
            self.at_once -= 1

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/v1/speculation", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_):
        await self.session.close()
        await self.runner.cleanup()

    async def read(self, *pods, **fields):
        return await read_pods(self.session, pods or [HERE], self.port, clock=lambda: 7.0, **fields)


def _says(status, body):
    async def respond(request):
        return web.Response(status=status, body=body if isinstance(body, (str, bytes)) else json.dumps(body))

    return respond


async def test_an_answer_becomes_a_sample_of_the_rounds_start():
    async with Runtime(_says(200, ACTIVE["response"]["body"])) as runtime:
        [(name, sample)] = (await runtime.read()).items()
    assert (name, sample.at, sample.error) == ("here", 7.0, "")
    assert sample.answer.revision == "7d0c1f2a"
    assert runtime.requests == [("GET", None, "")]


async def _break_off(request):
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("respond", "said"),
    [
        (_says(200, "not json"), "answered wrongly"),
        (_says(200, b"\xff\xfe"), "answered wrongly"),
        (_says(200, "[" * 60000), "answered wrongly"),
        (_says(200, "NaN"), "answered wrongly"),
        (_says(200, {**ACTIVE["response"]["body"], "running": -1}), "running must be a number"),
        (_says(200, b" " * 100_000), "more than 65536 bytes"),
        (_says(404, ""), "answered 404"),
        (_says(503, {"error": {"message": "loading"}}), "answered 503: loading"),
        (_says(302, ""), "answered 302"),
        (_break_off, "broke off"),
    ],
    ids=("no json", "no text", "deep", "NaN", "negative", "endless", "404", "503", "redirect", "reset"),
)
async def test_a_wrong_answer_is_a_failed_sample_that_says_why(respond, said):
    async with Runtime(respond) as runtime:
        sample = (await runtime.read())["here"]
    assert sample.answer is None
    assert said in sample.error


async def test_a_pod_that_never_answers_costs_its_time_and_no_more(monkeypatch):
    async def never(request):
        await asyncio.Event().wait()

    monkeypatch.setattr(measure, "TIMEOUT", aiohttp.ClientTimeout(total=0.2))
    async with Runtime(never) as runtime:
        sample = (await runtime.read())["here"]
    assert sample.error.startswith("no answer from port")


async def test_pods_of_other_models_that_never_answer_are_waited_for_and_silence_nobody(monkeypatch):
    async def respond(request):
        if len(runtime.requests) <= 2:
            await asyncio.Event().wait()
        return web.json_response(ACTIVE["response"]["body"])

    monkeypatch.setattr(measure, "TIMEOUT", aiohttp.ClientTimeout(total=0.2, connect=0.1))
    slots = asyncio.Semaphore(1)
    async with Runtime(respond) as runtime:
        silent = [replace(HERE, name=f"silent-{n}") for n in range(2)]
        theirs, ours = await asyncio.gather(runtime.read(*silent, slots=slots), runtime.read(slots=slots))
    assert not any(sample.answer for sample in theirs.values())
    assert ours["here"].answer


async def test_one_bad_pod_spoils_no_other():
    async with Runtime(_says(200, ACTIVE["response"]["body"])) as runtime:
        found = await runtime.read(HERE, pod("nowhere", ip=""), pod("six", ip="::ffff:127.0.0.2"))
    assert found["here"].answer
    assert found["nowhere"].error == "the pod has no address yet"
    assert found["six"].error.startswith("cannot connect to port")


async def test_many_pods_are_read_a_bounded_number_at_a_time():
    async def slowly(request):
        await asyncio.sleep(0.01)
        return web.json_response(ACTIVE["response"]["body"])

    async with Runtime(slowly) as runtime:
        found = await runtime.read(*(replace(HERE, name=f"pod-{n}") for n in range(100)))
        assert 1 < runtime.most_at_once <= measure.CONCURRENCY
    assert len(found) == 100
    assert all(sample.answer for sample in found.values())


async def test_a_policy_is_put_whole_and_with_the_token():
    async with Runtime(_says(200, SUSPENDED["response"]["body"])) as runtime:
        answer = await put_policy(runtime.session, HERE, POLICY, "TOKEN", runtime.port)
    [(method, token, body)] = runtime.requests
    assert (method, token) == ("PUT", SUSPENDED["request"]["headers"]["Authorization"])
    assert json.loads(body) == SUSPENDED["request"]["body"]
    assert answer.state == "Suspended"


@pytest.mark.parametrize("exchange", [WITHOUT_TOKEN, BAD_MODE], ids=("401", "400"))
async def test_a_refused_policy_says_why(exchange):
    response = exchange["response"]
    async with Runtime(_says(response["status"], response["body"])) as runtime:
        with pytest.raises(Rejected) as error:
            await put_policy(runtime.session, HERE, POLICY, "", runtime.port)
    assert error.value.status == response["status"]
    assert response["body"]["error"]["message"] in str(error.value)


async def test_a_pod_in_trouble_is_told_later():
    async with Runtime(_says(503, "")) as runtime:
        with pytest.raises(Unavailable):
            await put_policy(runtime.session, HERE, POLICY, "TOKEN", runtime.port)
