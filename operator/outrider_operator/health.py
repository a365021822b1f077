"""Two small HTTP servers: /healthz says whether lists, watches and queue move, /metrics what Prometheus asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

Check = Callable[[], str]  # what is wrong, in words; empty when nothing is


def health(checks: Mapping[str, Check]) -> web.Application:
    """503 and the reasons while any check finds trouble: an open port alone proves nothing."""

    async def answer(_: web.Request) -> web.Response:
        trouble = {name: words for name, check in checks.items() if (words := check())}
        return web.json_response({"healthy": not trouble, "trouble": trouble}, status=503 if trouble else 200)

    application = web.Application()
    application.router.add_get("/healthz", answer)
    return application


def exposition(registry: CollectorRegistry) -> web.Application:
    async def answer(_: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=generate_latest(registry), headers=headers)

    application = web.Application()
    application.router.add_get("/metrics", answer)
    return application


async def serve(application: web.Application, address: str, port: int) -> web.AppRunner:
    """Listens until the runner is cleaned up. Raises OSError when the port is taken."""
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    return runner
