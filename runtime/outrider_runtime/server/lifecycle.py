"""The server's life: sockets first, then the model, then serving until SIGTERM or the engine's death."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from outrider_runtime.config import EngineConfig, ServerConfig
from outrider_runtime.engine.client import EngineClient, EngineProcess
from outrider_runtime.errors import Unavailable
from outrider_runtime.server import admin, app
from outrider_runtime.server.service import Service, load_model

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 2.0  # for error events to reach their clients


class _Signals:
    """The first SIGTERM or SIGINT asks for a drain, a second one cuts it short."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._received)

    def _received(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def serve(
    engine: EngineConfig, config: ServerConfig, process: EngineProcess, sockets: Sequence[socket.socket]
) -> None:
    """Until all is done. `sockets` are bound: the API's and the admin port's. Raises Refusal, EngineDead."""
    signals = _Signals()
    client = EngineClient(process.channel, process)
    service = Service(config, engine.scheduler, client, engine.policy)
    runners = [  # a client that goes away ends its answer, but not the setting of a policy
        web.AppRunner(build(service), handler_cancellation=ends, access_log=None, shutdown_timeout=_LAST_WORDS_SECONDS)
        for build, ends in ((app.application, True), (admin.application, False))
    ]
    try:
        for runner, bound in zip(runners, sockets, strict=True):
            await runner.setup()
            await web.SockSite(runner, bound, backlog=1024).start()
        await _live(service, signals)
    finally:
        await asyncio.gather(*(runner.cleanup() for runner in runners))
        await client.close()


async def _live(service: Service, signals: _Signals) -> None:
    engine = service.engine
    stop = asyncio.ensure_future(signals.stop.wait())
    await _first(stop, engine.ready)
    if not engine.ready.done():
        log.info("stopped while loading")
        return
    service.model = await asyncio.to_thread(load_model, engine.ready.result())
    log.info("serving", extra={"model": service.config.served_model_name, "port": service.config.port})
    await _first(stop, engine.died)
    if stop.done():
        await _drain(service, signals)
    if engine.died.done():
        await service.idle(_LAST_WORDS_SECONDS)
        raise engine.died.result()


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _drain(service: Service, signals: _Signals) -> None:
    """Finish what runs, at most for the drain timeout; what is left gets an error event."""
    service.draining = True
    timeout = service.config.drain_timeout
    log.info("draining", extra={"requests": service.engine.in_flight, "timeout_seconds": timeout})
    idle = asyncio.ensure_future(service.idle(timeout))
    hurry = asyncio.ensure_future(signals.hurry.wait())
    await _first(idle, hurry, service.engine.died)
    idle.cancel()
    hurry.cancel()
    left = service.engine.in_flight
    service.engine.fail_all(Unavailable("the server is shutting down", "server_shutdown"))
    await service.idle(_LAST_WORDS_SECONDS)
    log.info("drained", extra={"cut_off": left})
