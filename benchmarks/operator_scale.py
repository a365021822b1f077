"""A thousand objects on a real API server: every child and status of each, then a restart over them.

    python benchmarks/operator_scale.py [--objects 1000]

Writes benchmarks/results/operator_scale.json and prints it. Exit code 1 when a limit is not held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "hack" / "cluster")]

from localcluster import build  # noqa: E402
from localcluster.controlplane import GOGC, ControlPlane  # noqa: E402
from localcluster.paths import Home  # noqa: E402

from outrider_operator.kube import Client, load  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

LIMITS = {"create_1000_seconds": 40.0, "restart_writes": 0, "rss_mb": 250.0}
CHILDREN = ("Secret", "ConfigMap", "Deployment", "Service", "PodDisruptionBudget")
WATCHED = ("SpeculativeModel", "ConfigMap", "Deployment", "Service", "PodDisruptionBudget")
NAMESPACE = "default"
READS = ("get", "list")
DEADLINE = 300.0  # seconds for each step


def model(number: int) -> dict[str, Any]:
    return {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeModel",
        "metadata": {"name": f"model-{number:05}", "namespace": NAMESPACE},
        "spec": {
            "model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"},
            "speculativeDecoding": {
                "draft": {"uri": "hf://meta-llama/Llama-3.2-1B-Instruct"},
                "numSpeculativeTokens": 5,
                "saturation": {"disableAtConcurrency": 16, "enableAtConcurrency": 12},
            },
            "autoscaling": {"minReplicas": 1, "maxReplicas": 8, "targetConcurrency": 10},
        },
    }


class Operator:
    """The operator as a process of its own, as it runs in a cluster."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self._port = _free_port()
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "operator"), "OUTRIDER_METRICS_PORT": str(self._port)}
        command = [sys.executable, "-m", "outrider_operator", "--kubeconfig", str(kubeconfig), "--health-port", "0",
                   "--bind-address", "127.0.0.1", "--namespace", NAMESPACE, "--log-level", "warning"]  # fmt: skip
        self._log = log.open("ab")
        self._process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)

    def metrics(self) -> str:
        """The exposition; empty while the port does not answer yet."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the operator ended with {self._process.returncode}: see {self._log.name}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def writes(self) -> int:
        """Requests that change something, its Lease apart."""
        found = re.findall(r"^outrider_api_requests_total\{(.*)\} ([0-9.e+]+)$", self.metrics(), re.MULTILINE)
        return int(sum(float(n) for names, n in found if 'kind="Lease"' not in names and not _is_read(names)))

    def reconciled(self) -> int:
        found = re.findall(r"^outrider_reconcile_seconds_count\{.*\} ([0-9.e+]+)$", self.metrics(), re.MULTILINE)
        return int(sum(map(float, found)))

    def memory(self, field: str) -> float:
        """VmRSS or VmHWM, its peak, in MB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) / 1000

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(30)
        self._log.close()


@contextmanager
def running(plane: ControlPlane) -> Iterator[Operator]:
    operator = Operator(plane.kubeconfig, plane.folder / "operator.log")
    try:
        yield operator
    except Exception:
        sys.stderr.write((plane.folder / "operator.log").read_text()[-4000:])
        raise
    finally:
        operator.stop()


class CpuSeconds:
    """User and system time by process: what is comparable on a machine that does other things too."""

    def __init__(self, plane: ControlPlane, operator: Operator) -> None:
        self._pids = {"operator": operator.pid, "benchmark": os.getpid(), **plane.pids()}
        self._started = self._read()

    def so_far(self) -> dict[str, float]:
        return {name: round(seconds - self._started[name], 1) for name, seconds in self._read().items()}

    def _read(self) -> dict[str, float]:
        return {name: _cpu_seconds(pid) for name, pid in self._pids.items()}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(plane: ControlPlane, objects: int) -> dict[str, Any]:
    plane.kubectl("apply", "-f", str(ROOT / "crds" / "speculativemodels.outrider.dev.yaml"))
    client = Client(await load(str(plane.kubeconfig)), connections=16)
    try:
        with running(plane) as operator:
            await _eventually(lambda: "outrider_leader 1.0" in operator.metrics(), "the operator leads")
            started, cpu = time.monotonic(), CpuSeconds(plane, operator)
            await _create(client, objects)
            created = time.monotonic() - started
            await _settled(client, objects)
            seconds, spent = time.monotonic() - started, cpu.so_far()
            await _complete(client, objects)
            writes, reconciles = operator.writes(), operator.reconciled()
            await _eventually(lambda: _is_quiet(operator), "the operator is idle")
            resident = operator.memory("VmRSS")
            peak = operator.memory("VmHWM")
        before = await versions(client, WATCHED)
        with running(plane) as operator:
            started, cpu = time.monotonic(), CpuSeconds(plane, operator)
            await _eventually(lambda: operator.reconciled() >= objects, "every object was looked at again")
            restarted, spent_again = time.monotonic() - started, cpu.so_far()
            await _eventually(lambda: _is_quiet(operator), "the operator is idle")
            restart_writes = operator.writes()
            resident, peak = max(resident, operator.memory("VmRSS")), max(peak, operator.memory("VmHWM"))
        changed = sum(before.get(key) != value for key, value in (await versions(client, WATCHED)).items())
    finally:
        await client.close()
    return {
        "objects": objects,
        "create_1000_seconds": round(seconds * 1000 / objects, 1),
        "posting_seconds": round(created, 1),
        "cpu_seconds": {**spent, "all": round(sum(spent.values()), 1)},
        "writes": writes,
        "reconciles": reconciles,
        "restart_seconds": round(restarted, 1),
        "restart_cpu_seconds": {**spent_again, "all": round(sum(spent_again.values()), 1)},
        "restart_writes": max(restart_writes, changed),
        "rss_mb": round(resident, 1),
        "rss_peak_mb": round(peak, 1),
    }


async def _create(client: Client, objects: int) -> None:
    numbers = iter(range(objects))

    async def post() -> None:
        for number in numbers:
            await client.create(model(number))

    await asyncio.gather(*(post() for _ in range(8)))


async def _settled(client: Client, objects: int) -> None:
    """Every status speaks of the spec as it is; a status is written after all children are."""
    deadline = time.monotonic() + DEADLINE
    for number in reversed(range(objects)):  # one by one from the last: lists of all would be a load of their own
        while not _is_current(await client.get("SpeculativeModel", NAMESPACE, f"model-{number:05}")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"model-{number:05} has no status after {DEADLINE:.0f} s")
            await asyncio.sleep(0.2)
        if number < objects - 20:
            break
    while (done := sum([_is_current(item) async for item in every(client, "SpeculativeModel")])) < objects:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{done} of {objects} objects have a status after {DEADLINE:.0f} s")
        await asyncio.sleep(0.5)


async def _complete(client: Client, objects: int) -> None:
    """Raises unless every child is there."""
    for kind in CHILDREN:
        if kind != "Secret":
            count = sum([1 async for item in every(client, kind) if item["metadata"].get("ownerReferences")])
            if count != objects:
                raise RuntimeError(f"{count} of {objects} {kind} objects are there")
    for number in (0, objects // 2, objects - 1):  # nobody lists Secrets
        await client.get("Secret", NAMESPACE, f"model-{number:05}-admin")


def _is_current(item: dict[str, Any]) -> bool:
    status = item.get("status", {})
    return bool(status.get("conditions")) and status["observedGeneration"] == item["metadata"]["generation"]


async def versions(client: Client, kinds: Iterable[str]) -> dict[tuple[str, str], str]:
    return {
        (kind, item["metadata"]["name"]): item["metadata"]["resourceVersion"]
        for kind in kinds
        async for item in every(client, kind)
    }


async def every(client: Client, kind: str) -> AsyncIterator[dict[str, Any]]:
    async for page in client.pages(kind, NAMESPACE):
        for item in page.items:
            yield item


async def _eventually(holds: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not await asyncio.to_thread(holds):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {DEADLINE:.0f} s: {what}")
        await asyncio.sleep(0.5)  # to show its metrics costs the operator a look at every object


def _is_quiet(operator: Operator) -> bool:
    """Nothing was reconciled for two seconds."""
    before = operator.reconciled()
    time.sleep(2)
    return operator.reconciled() == before


def _is_read(names: str) -> bool:
    return any(f'verb="{verb}"' in names for verb in READS)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--objects", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "operator_scale.json")
    arguments = parser.parse_args()
    with ControlPlane(build.ensure(Home.of())) as plane:
        kubernetes = plane.kubectl("version", "-o", "json")
        result = asyncio.run(measure(plane, arguments.objects))
    result["limits"] = LIMITS
    result["settings"] = {
        "cpus": os.cpu_count(),
        "children": list(CHILDREN),
        "api_server": f"etcd without fsync, RBAC, GOGC={GOGC}",
    }
    packages = ("kopf", "kubernetes", "aiohttp", "pydantic")
    result["versions"] = {
        "python": platform.python_version(),
        "kubernetes_server": json.loads(kubernetes)["serverVersion"]["gitVersion"],
        **{package: version(package) for package in packages},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    broken = [name for name, limit in LIMITS.items() if result[name] > limit]
    if broken:
        print(f"over the limit: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
