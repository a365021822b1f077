"""Reading and telling pods over HTTP: the only file of the fleet that touches a socket."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import aiohttp

from outrider_operator.errors import Rejected, Unavailable
from outrider_operator.fleet.answer import parse_answer
from outrider_operator.fleet.policy import Policy
from outrider_operator.fleet.samples import Answer, Sample
from outrider_operator.observe import Pod

ADMIN_PORT = 8001
CONCURRENCY = 32  # pods of one model read at once
TIMEOUT = aiohttp.ClientTimeout(total=4.0, connect=2.0)  # below the 5 s between rounds
LARGEST_BODY = 64 * 1024  # bytes; an answer is about one thousandth of a megabyte


async def read_pods(
    session: aiohttp.ClientSession,
    pods: Iterable[Pod],
    port: int = ADMIN_PORT,
    clock: Callable[[], float] = time.monotonic,
    slots: asyncio.Semaphore | None = None,
) -> dict[str, Sample]:
    """GET /v1/speculation from each pod, by pod name. `slots` bounds how many of all models are read at once: waiting
    for one is not waiting for the pod, as waiting for a connection of the session's pool would be.

    Never raises for a pod's fault: the sample says what it was. All samples of a round carry the time of its start, so
    that pods can be compared round by round; what a pod did in between is exact by its own clock in any case.
    """
    at = clock()
    own, shared = asyncio.Semaphore(CONCURRENCY), slots or nullcontext()

    async def read(pod: Pod) -> Sample:
        async with own, shared:
            try:
                answer = await _exchange(session, "GET", pod, port)
            except (Unavailable, Rejected) as error:
                return Sample(at, None, str(error))
            return Sample(at, answer)

    every = list(pods)
    return dict(zip((pod.name for pod in every), await asyncio.gather(*map(read, every)), strict=True))


async def put_policy(
    session: aiohttp.ClientSession, pod: Pod, policy: Policy, token: str, port: int = ADMIN_PORT
) -> Answer:
    """PUT the whole policy to one pod and return what it says it does now.

    Raises Unavailable when the pod does not answer or not in order, Rejected when it refuses the token or a field.
    """
    return await _exchange(session, "PUT", pod, port, policy, token)


async def _exchange(
    session: aiohttp.ClientSession,
    method: str,
    pod: Pod,
    port: int,
    policy: Policy | None = None,
    token: str = "",
) -> Answer:
    if not pod.ip:
        raise Unavailable("the pod has no address yet")
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    headers = {"Authorization": f"Bearer {token}"} if policy else None
    body = policy.to_json() if policy else None
    try:
        async with session.request(
            method,
            f"http://{host}:{port}/v1/speculation",
            json=body,
            headers=headers,
            timeout=TIMEOUT,
            allow_redirects=False,
        ) as response:
            raw = await _read(response)
            if response.status != 200:
                raise _refusal(response.status, raw)
            return parse_answer(json.loads(raw))
    except TimeoutError as error:
        raise Unavailable(f"no answer from port {port} within {TIMEOUT.total:g} s") from error
    except aiohttp.ClientConnectorError as error:
        raise Unavailable(f"cannot connect to port {port}: {error.os_error.strerror or error.os_error}") from error
    except aiohttp.ClientError as error:
        raise Unavailable(f"port {port} broke off: {type(error).__name__}") from error
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"port {port} answered wrongly: {error}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body, at most LARGEST_BODY of it: a pod cannot fill the operator's memory."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > LARGEST_BODY:
            raise ValueError(f"a body of more than {LARGEST_BODY} bytes")
    return bytes(body)


def _refusal(status: int, body: bytes) -> Unavailable | Rejected:
    try:
        message = str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        message = "no reason given"
    text = f"the pod answered {status}: {message}"
    return Rejected(text, status) if 400 <= status < 500 and status not in (408, 429) else Unavailable(text)
