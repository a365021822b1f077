"""`outrider-operator` as a process, the way its container runs it: all namespaces, the Lease, probes, SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from localcluster.controlplane import ControlPlane
from tests.cluster.operator_rig import SYSTEM, Rig, eventually, smallest

pytest_plugins = ["tests.cluster.operator_fixtures"]

LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/outrider-operator"
OPERATOR = Path(__file__).parents[2] / "operator"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Process:
    def __init__(self, account: Path, *arguments: str) -> None:
        self.health, self.metrics = _free_port(), _free_port()
        self.identity = f"process-{self.health}"
        self._arguments = [
            *("--kubeconfig", str(account), "--namespace", SYSTEM, "--identity", self.identity),
            *("--bind-address", "127.0.0.1", "--health-port", str(self.health), "--metrics-port", str(self.metrics)),
            *arguments,
        ]

    async def __aenter__(self) -> Process:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "outrider_operator",
            *self._arguments,
            env={**os.environ, "PYTHONPATH": str(OPERATOR)},
            stderr=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()

    async def terminate(self) -> tuple[int | None, str]:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            _, errors = await self.process.communicate()
        return self.process.returncode, errors.decode()

    async def is_healthy(self) -> bool:
        return (await self.page(self.health, "/healthz"))[0] == 200

    async def page(self, port: int, path: str) -> tuple[int, str]:
        def ask() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()
            except OSError:
                return 0, ""

        return await asyncio.to_thread(ask)


@pytest.fixture
async def process(account: Path) -> AsyncIterator[Process]:
    async with Process(account) as process:
        yield process


async def test_it_serves_probes_and_metrics_works_everywhere_and_ends_well(
    process: Process, rig: Rig, installed: ControlPlane
) -> None:
    await eventually(process.is_healthy, "healthy", 40)
    await rig.create(smallest())
    await eventually(rig.is_settled, "children and status", 40)
    _, metrics = await process.page(process.metrics, "/metrics")
    assert "outrider_leader 1.0" in metrics
    assert 'outrider_api_requests_total{code="201",kind="Deployment",verb="apply"}' in metrics
    assert installed.api.request("GET", LEASE)["spec"]["holderIdentity"] == process.identity

    code, log = await process.terminate()
    assert code == 0, log
    assert '"level": "error"' not in log, log
    assert "Traceback" not in log, log
    assert installed.api.request("GET", LEASE)["spec"]["holderIdentity"] == ""


async def test_it_ends_at_once_while_it_waits_for_the_lease(process: Process, account: Path, rig: Rig) -> None:
    await eventually(lambda: _leads(process), "the first leads", 40)
    async with Process(account) as second:
        await eventually(second.is_healthy, "a waiting one is healthy too", 40)
        assert not await _leads(second)
        code, log = await second.terminate()
        assert code == 0, log


async def test_without_rights_it_waits_and_says_what_it_may_not(installed: ControlPlane, rig: Rig) -> None:
    nobody = installed.kubeconfig_for("nobody")
    async with Process(nobody, "--leader-elect=false") as process:
        await eventually(lambda: _was_refused(process), "a list was tried", 40)
        code, log = await process.terminate()
    assert code == 0, log
    assert "cannot list yet" in log
    assert "forbidden" in log


async def _leads(process: Process) -> bool:
    return "outrider_leader 1.0" in (await process.page(process.metrics, "/metrics"))[1]


async def _was_refused(process: Process) -> bool:
    return 'code="403"' in (await process.page(process.metrics, "/metrics"))[1]
