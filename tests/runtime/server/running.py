"""`outrider serve` as a process of its own, for tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

REPOSITORY = Path(__file__).parents[3]
MODEL = "tiny"
START_SECONDS = 90.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def poll(condition: Callable[[], Any], timeout: float, what: str) -> Any:
    end = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {timeout} s")
        time.sleep(0.02)
    return value


@dataclass
class Server:
    process: subprocess.Popen
    port: int
    admin_port: int
    termination_log: Path
    log: Path

    def request(self, path: str, body: object = None, method: str | None = None) -> tuple[int, dict, dict]:
        """Status, headers, body of an admin request, or of an API request for paths that are the API's."""
        port = self.admin_port if path in ("/readyz", "/healthz", "/v1/speculation", "/metrics") else self.port
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, dict(response.headers), json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), json.loads(error.read())

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"exited with {self.process.returncode}:\n{self.log.read_text()}")
        try:
            return self.request("/readyz")[0] == 200
        except OSError:
            return False

    def wait_ready(self) -> Server:
        poll(self.is_ready, START_SECONDS, "ready")
        return self

    def speculation(self) -> dict:
        return self.request("/v1/speculation")[2]

    def child(self) -> int:
        """Process id of the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(poll(lambda: children.read_text().split(), 10, "the engine's process")[0])

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60)

    def ended(self, timeout: float = 30) -> int:
        return self.process.wait(timeout)


@contextmanager
def serving(folder: Path, model: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """Started, not yet ready. Whatever happens, it is gone afterwards."""
    port, admin_port = free_ports(2)
    termination_log, log = folder / "termination", folder / "log"
    termination_log.touch()
    command = [
        *(sys.executable, "-m", "outrider_runtime", "serve", "--model", str(model), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port), "--admin-port", str(admin_port), "--kv-blocks", "256"),
        *("--termination-log", str(termination_log), *flags),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "runtime"), "OMP_NUM_THREADS": "1", **environment}
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr, env=environment, cwd=folder) as process:
        try:
            yield Server(process, port, admin_port, termination_log, log)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
