"""The simulated pods keep the contract that the runtime keeps (tests/runtime/server/test_admin.py), exchange by
exchange, so that what is tried on them says something about real ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from tests.fleet.admin import AdminPorts, Fault
from tests.fleet.pod import Pod

from outrider_operator.fleet.answer import parse_answer
from outrider_runtime.speculation.policy import parse_policy

FOLDER = Path(__file__).parents[1] / "contract" / "speculation"
EXCHANGES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
ANY_OK = EXCHANGES["get-active"]["response"]["body"]
EXACT = ("policy", "effective", "model", "draft")  # the rest are moving numbers, of which names and types count


def _pod(exchange):
    """A pod in the state in which a runtime gives this answer."""
    body = exchange["response"]["body"] if exchange["response"]["status"] == 200 else ANY_OK
    before = body["policy"] if exchange["request"]["method"] == "GET" else ANY_OK["policy"]
    return Pod(
        policy=parse_policy(before),
        max_tokens=body["effective"]["maxTokens"],
        model=body["model"],
        draft=body["draft"],
        measures_break_even=body["breakEvenConcurrency"] is not None,
    )


async def _exchange(address, request):
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            request["method"],
            f"http://{address}:8001{request['path']}",
            headers=request["headers"],
            json=request.get("body"),
        ) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize("name", EXCHANGES)
async def test_the_exchange_of_the_contract_is_answered_as_written(name):
    exchange = EXCHANGES[name]
    pod, expected = _pod(exchange), exchange["response"]
    async with AdminPorts() as ports:
        status, body = await _exchange(await ports.open(pod), exchange["request"])
    assert status == expected["status"]
    if status != 200:
        assert body == expected["body"]
        return
    assert {part: body[part] for part in EXACT} == {part: expected["body"][part] for part in EXACT}
    assert _shape(body) == _shape(expected["body"])
    parse_answer(body)
    if exchange["request"]["method"] == "PUT":
        assert pod.policy == parse_policy(exchange["request"]["body"])


def _shape(body):
    """Names and kinds of the moving numbers; speedup is known while something runs, and here nothing does."""
    counters = {name: isinstance(value, (int, float)) for name, value in body["counters"].items()}
    return set(body), counters, body["breakEvenConcurrency"] is None


async def _read(address):
    status, body = await _exchange(address, EXCHANGES["get-active"]["request"])
    if status != 200:
        raise ValueError(status)
    return parse_answer(body)


@pytest.mark.parametrize("fault", [Fault.NAN, Fault.NEGATIVE, Fault.HTML, Fault.ERROR, Fault.RESET])
async def test_a_faulty_pod_is_wrong_in_its_own_way_until_it_is_well_again(fault):
    async with AdminPorts() as ports:
        address = await ports.open(Pod())
        ports.at(address).fault = fault
        with pytest.raises((ValueError, aiohttp.ClientError)):
            await _read(address)
        ports.at(address).fault = Fault.NONE
        assert (await _read(address)).state == "Active"


async def test_a_slow_pod_does_not_answer_and_a_closed_one_refuses():
    async with AdminPorts() as ports:
        address = await ports.open(Pod())
        ports.at(address).fault = Fault.SLOW
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_exchange(address, EXCHANGES["get-active"]["request"]), 0.1)
        await ports.close(address)
        with pytest.raises(aiohttp.ClientConnectorError):
            await _exchange(address, EXCHANGES["get-active"]["request"])
