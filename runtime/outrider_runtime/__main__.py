"""`outrider serve | check`."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from argparse import Namespace
from pathlib import Path

from outrider_runtime import flags, logs
from outrider_runtime.config import EngineConfig, ServerConfig
from outrider_runtime.engine.client import EngineProcess
from outrider_runtime.errors import EngineDead, Refusal

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    logs.set_up()
    termination_log = Path("/dev/termination-log")
    try:
        parsed, warnings = flags.parse(sys.argv[1:] if argv is None else argv)
        for warning in warnings:
            log.warning(warning)
        termination_log = getattr(parsed, "termination_log", termination_log)
        return _COMMANDS[parsed.command](parsed)
    except (Refusal, EngineDead) as fault:
        sys.stderr.write(f"{fault}\n")
        if termination_log.is_file():
            termination_log.write_text(f"{fault}\n")
        return fault.exit_code


def _serve(parsed: Namespace) -> int:
    _end_at_once_on_signals()  # until serve() drains on them
    engine = flags.engine_config(parsed, os.environ)
    server = flags.server_config(parsed, os.environ)
    sockets = [
        _bound(server.host, port, flag) for port, flag in ((server.port, "--port"), (server.admin_port, "--admin-port"))
    ]
    process = EngineProcess(engine)
    asyncio.run(_run(engine, server, process, sockets))
    return 0


def _end_at_once_on_signals() -> None:
    """Nothing is served yet, and the engine's process ends with this one. An exception would be raised in the middle of
    whatever is being imported, which may drop it or make another of it; without a handler PID 1 ignores the signal."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: os._exit(0))


async def _run(
    engine: EngineConfig, server: ServerConfig, process: EngineProcess, sockets: list[socket.socket]
) -> None:
    from outrider_runtime.server.lifecycle import serve  # late: its imports and the engine's overlap

    await serve(engine, server, process, sockets)


def _bound(host: str, port: int, flag: str) -> socket.socket:
    """Raises Refusal(PortInUse or InvalidArgument)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Refusal(
                "PortInUse", f"port {port} of {host} is in use; end its user or give another {flag}"
            ) from error
        raise Refusal("InvalidArgument", f"--host {host} {flag} {port} cannot be listened on: {error}") from error
    return bound


def _check(parsed: Namespace) -> int:
    from outrider_runtime.check import run_check  # imports torch

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")

    return run_check(flags.engine_config(parsed, os.environ), say)


_COMMANDS = {"serve": _serve, "check": _check}

if __name__ == "__main__":
    sys.exit(main())
