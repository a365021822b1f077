"""The admin ports of simulated pods over real HTTP, each on an address of its own, with the faults that pods have."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from aiohttp import web
from tests.fleet.pod import Pod

from outrider_runtime.speculation.policy import PolicyError

PORT = 8001


class Fault(Enum):
    NONE = "none"
    SLOW = "slow"  # it never gets to answer
    NAN = "NaN"
    NEGATIVE = "negative"
    HTML = "HTML"
    ERROR = "500"
    RESET = "reset"


@dataclass
class Served:
    """One pod behind its address."""

    pod: Pod
    token: str = "TOKEN"
    fault: Fault = Fault.NONE
    puts: int = 0


class AdminPorts:
    """GET and PUT /v1/speculation for any number of pods, by one server.

    With a `clock` a pod serves up to now before it answers; without one somebody else moves it on.
    """

    def __init__(self, clock: Callable[[], float] | None = None, port: int = PORT) -> None:
        self._clock, self._port = clock, port
        self._served: dict[str, Served] = {}
        self._sites: dict[str, web.TCPSite] = {}
        network = f"127.{random.randint(1, 250)}"  # runs side by side must not meet
        first = random.randrange(50_000)
        self._addresses = (f"{network}.{n // 250}.{n % 250 + 1}" for n in itertools.count(first))
        application = web.Application(client_max_size=64 * 1024)
        application.router.add_route("GET", "/v1/speculation", self._get)
        application.router.add_route("PUT", "/v1/speculation", self._put)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1, access_log=None)

    async def __aenter__(self) -> AdminPorts:
        await self._runner.setup()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def open(self, pod: Pod, token: str = "TOKEN") -> str:
        """The address at which the pod now answers."""
        address = next(self._addresses)
        site = web.TCPSite(self._runner, address, self._port)
        await site.start()
        self._served[address], self._sites[address] = Served(pod, token), site
        return address

    async def close(self, address: str) -> None:
        """From now on nobody listens there."""
        del self._served[address]
        await self._sites.pop(address).stop()

    def at(self, address: str) -> Served:
        return self._served[address]

    async def _get(self, request: web.Request) -> web.StreamResponse:
        served = self._of(request)
        return await self._faulty(request, served) or self._answer(served)

    async def _put(self, request: web.Request) -> web.StreamResponse:
        served = self._of(request)
        if faulty := await self._faulty(request, served):
            return faulty
        if request.headers.get("Authorization") != f"Bearer {served.token}":
            message = "PUT /v1/speculation needs the admin token as a bearer token"
            return _error(401, "Authorization", message)
        try:
            served.pod.put(json.loads(await request.read()))
        except PolicyError as error:
            return _error(400, error.field, error.message)
        except ValueError as error:
            return _error(400, "", f"the body is not valid JSON: {error}")
        served.puts += 1
        return self._answer(served)

    def _of(self, request: web.Request) -> Served:
        name = request.transport.get_extra_info("sockname") if request.transport else None
        served = self._served.get(name[0]) if name else None
        if served is None:
            raise web.HTTPNotFound
        return served

    def _answer(self, served: Served) -> web.Response:
        if self._clock:
            served.pod.advance(self._clock())
        return web.json_response(served.pod.body())

    async def _faulty(self, request: web.Request, served: Served) -> web.StreamResponse | None:
        match served.fault:
            case Fault.NONE:
                return None
            case Fault.SLOW:
                await asyncio.Event().wait()
            case Fault.RESET:
                if request.transport:
                    request.transport.abort()
            case Fault.HTML:
                return web.Response(text="<html><body>It works!</body></html>", content_type="text/html")
            case Fault.ERROR:
                return _error(500, "", "the engine is gone")
        body = served.pod.body()
        body["counters"]["running_request_seconds"] = float("nan") if served.fault is Fault.NAN else -1.0
        return web.Response(text=json.dumps(body), content_type="application/json")


def _error(status: int, field: str, message: str) -> web.Response:
    return web.json_response({"error": {"field": field, "message": message}}, status=status)
