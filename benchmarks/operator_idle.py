"""A thousand idle objects with a ready pod each, on a real API server: what standing still costs.

    python benchmarks/operator_idle.py [--objects 1000] [--seconds 600]

The pods' admin ports are simulated (tests/fleet) and read over real HTTP every five seconds, as in a cluster. Writes
benchmarks/results/operator_idle.json and prints it. Exit code 1 when a limit is not held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import sys
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / each) for each in ("operator", "runtime", "hack/cluster", "benchmarks"))]

from localcluster import build  # noqa: E402
from localcluster.api import MERGE_PATCH, poll  # noqa: E402
from localcluster.controlplane import ControlPlane  # noqa: E402
from localcluster.paths import Home  # noqa: E402
from tests.fleet.admin import AdminPorts  # noqa: E402
from tests.fleet.pod import Pod  # noqa: E402

from operator_scale import NAMESPACE, CpuSeconds, Operator, every, model, running, versions  # noqa: E402
from outrider_operator.kube import Client, load  # noqa: E402

if TYPE_CHECKING:
    from localcluster.api import Api

LIMITS = {"writes": 0, "changed_objects": 0, "cpus": 0.5}
KINDS = ("SpeculativeModel", "ConfigMap", "Deployment", "Service", "PodDisruptionBudget")
SETTLE = 400.0  # seconds: the longest window of these objects is five minutes
DEADLINE = 600.0
COUNTS = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")


async def measure(plane: ControlPlane, objects: int, seconds: float) -> dict[str, Any]:
    plane.kubectl("apply", "-f", str(ROOT / "crds" / "speculativemodels.outrider.dev.yaml"))
    if not poll(lambda: plane.api.answers("/apis/outrider.dev/v1alpha1/speculativemodels"), 60):
        raise RuntimeError("the API server does not serve SpeculativeModels after 60 s")
    plane.api.request("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "default"}})
    client = Client(await load(str(plane.kubeconfig)), connections=16)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        ports = await stack.enter_async_context(AdminPorts(time.monotonic))
        operator = stack.enter_context(running(plane))
        for number in range(objects):
            await client.create(model(number))
        for number in range(objects):
            name = f"model-{number:05}"
            deployment = await _deployment(client, operator, name)
            policy = (await client.get("ConfigMap", NAMESPACE, f"{name}-policy"))["data"]["policy"]
            address = await ports.open(_pod(json.loads(policy)))
            await asyncio.to_thread(_serve, plane.api, name, address, deployment)
        await _all_ready(client, objects)
        await asyncio.sleep(min(SETTLE, seconds))
        before, writes, cpu = await versions(client, KINDS), operator.writes(), CpuSeconds(plane, operator)
        looks, reads = operator.reconciled(), _reads(operator)
        await asyncio.sleep(seconds)
        spent = cpu.so_far()
        found = {
            "writes": operator.writes() - writes,
            "reconciles_per_second": round((operator.reconciled() - looks) / seconds, 1),
            "reads_per_second": round((_reads(operator) - reads) / seconds, 1),
            "cpus": round(spent["operator"] / seconds, 3),
            "api_server_cpus": round(spent["kube-apiserver"] / seconds, 3),
            "rss_mb": round(operator.memory("VmRSS"), 1),
        }
        after = await versions(client, KINDS)
    changed = sum(before.get(key) != version for key, version in after.items())
    return {"objects": objects, "seconds": seconds, **found, "changed_objects": changed}


def _pod(policy: dict[str, Any]) -> Pod:
    pod = Pod(now=time.monotonic())
    pod.put(policy)
    return pod


async def _deployment(client: Client, operator: Operator, name: str) -> dict[str, Any]:
    """The model's, once the operator made it: the status is written after all children."""
    deadline = time.monotonic() + DEADLINE
    while not (await client.get("SpeculativeModel", NAMESPACE, name)).get("status", {}).get("conditions"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} has no status after {DEADLINE:.0f} s")
        await asyncio.to_thread(operator.metrics)  # raises when it has ended
        await asyncio.sleep(1)
    return await client.get("Deployment", NAMESPACE, name)


def _serve(api: Api, name: str, address: str, deployment: dict[str, Any]) -> None:
    """What controllers and a kubelet would have done: a ready pod at this address."""
    owner = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": f"{name}-1",
        "uid": str(uuid.uuid4()),
        "controller": True,
    }
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    api.request(
        "POST",
        pods,
        {
            "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
            "spec": {"containers": [{"name": "server", "image": "none"}]},
        },
    )
    ready = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    ready["conditions"] = [{"type": "Ready", "status": "True"}]
    api.request("PATCH", f"{pods}/{name}/status", {"status": ready}, content_type=MERGE_PATCH)
    counts = {**dict.fromkeys(COUNTS, 1), "observedGeneration": deployment["metadata"]["generation"]}
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{name}/status"
    api.request("PATCH", path, {"status": counts}, content_type=MERGE_PATCH)


async def _all_ready(client: Client, objects: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while (ready := sum([_is_ready(item) async for item in every(client, "SpeculativeModel")])) < objects:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{ready} of {objects} objects are Ready after {DEADLINE:.0f} s")
        await asyncio.sleep(2)


def _is_ready(item: dict[str, Any]) -> bool:
    conditions = {each["type"]: each for each in item.get("status", {}).get("conditions", ())}
    return bool(conditions.get("Ready", {}).get("status") == "True")


def _reads(operator: Operator) -> int:
    found = re.findall(r"^outrider_pod_measurements_total\{.*\} ([0-9.e+]+)$", operator.metrics(), re.MULTILINE)
    return int(sum(map(float, found)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--objects", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "operator_idle.json")
    arguments = parser.parse_args()
    with ControlPlane(build.ensure(Home.of())) as plane:
        result = asyncio.run(measure(plane, arguments.objects, arguments.seconds))
    result["limits"] = LIMITS
    result["settings"] = {"machine_cpus": os.cpu_count(), "measure_seconds": 5, "python": platform.python_version()}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    broken = [name for name, limit in LIMITS.items() if result[name] > limit]
    if broken:
        print(f"over the limit: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
