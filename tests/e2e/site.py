"""What the tests of this folder hold: a namespace of a real cluster, and how to look at an object in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import openai
import yaml

from demo import chat, install
from demo.cluster import Cluster
from demo.kubectl import Kubectl, is_true, stands_at
from demo.steps import ROOT, Step

T = TypeVar("T")

NAME = "chat"
DRAIN = 2  # seconds that a leaving pod's streams may run on
# Seconds. Only a failing test waits as long: nothing here may depend on how busy the machine is.
DEADLINE, PATIENCE = 150, 600  # for one thing that a test waits for; for a whole test
SAMPLES = ROOT / "manifests/samples"
SAMPLE = SAMPLES / "demo.yaml"
NGRAM = SAMPLES / "demo-ngram.yaml"
# Threads that wait for one another by spinning stand still where other processes have the cores.
THREADS = {"name": "OMP_NUM_THREADS", "value": "1"}


@dataclass(frozen=True)
class Site:
    """A namespace of the cluster, with the claim `demo-models` in it."""

    cluster: Cluster
    kubectl: Kubectl

    @property
    def system(self) -> Kubectl:
        """kubectl in the operator's namespace."""
        return self.kubectl.within(install.NAMESPACE)

    def get(self, name: str) -> dict[str, Any] | None:
        return self.kubectl.get("specm", name)

    def pods(self, name: str) -> list[dict[str, Any]]:
        return self.kubectl.items("pods", "--selector", f"outrider.dev/model={name}")

    def apply(
        self, name: str, change: Callable[[dict[str, Any]], None] = lambda spec: None, sample: Path = SAMPLE
    ) -> None:
        """An object of the demo under another name, its spec changed in place by `change`.

        The demo's draft does not pay on a CPU, so mode Auto would not draft with it: Enabled does.
        """
        obj = yaml.safe_load(sample.read_text())
        obj["metadata"] = {"name": name, "namespace": self.kubectl.namespace}
        obj["spec"]["resources"]["requests"] = {"cpu": "100m", "memory": "1Gi"}
        obj["spec"]["rollout"] = {"drainTimeoutSeconds": DRAIN}
        obj["spec"]["engine"]["env"] = [THREADS]
        obj["spec"]["speculativeDecoding"]["mode"] = "Enabled" if sample == SAMPLE else "Auto"
        change(obj["spec"])
        # server-side, so that a field left out now is taken back, also when another test had set it
        self.kubectl("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=json.dumps(obj))

    def patch(self, name: str, **fields: Any) -> None:
        """As a user changes fields of speculativeDecoding; None takes one out."""
        patch = json.dumps({"spec": {"speculativeDecoding": fields}})
        self.kubectl("patch", "specm", name, "--type", "merge", "--patch", patch)

    def speculation_of(self, pod: dict[str, Any]) -> dict[str, Any]:
        """What the pod itself says on its admin port."""
        path = f"/api/v1/namespaces/{self.kubectl.namespace}/pods/{pod['metadata']['name']}:8001/proxy/v1/speculation"
        return dict(json.loads(self.kubectl("get", "--raw", path)))

    def events(self, name: str) -> list[str]:
        """Reasons, oldest first."""
        found = self.kubectl.items("events", "--field-selector", f"involvedObject.name={name}")
        return [each["reason"] for each in sorted(found, key=lambda each: each["metadata"]["creationTimestamp"])]

    def until(
        self,
        what: str,
        reached: Callable[[dict[str, Any]], bool],
        *,
        name: str = NAME,
        condition: str = "Ready",
    ) -> dict[str, Any]:
        """The object once `reached`. Fails at DEADLINE with how `condition` stands then."""

        def look() -> tuple[dict[str, Any] | None, str]:
            obj = self.get(name)
            return (obj if obj and reached(obj) else None), stands_at(obj, condition)

        return poll(what, look)

    @contextmanager
    def client(self, name: str = NAME) -> Iterator[openai.OpenAI]:
        with self.cluster.reach(self.kubectl, name) as url, chat.client(url) as service:
            chat.await_endpoints(service)
            yield service


def poll(what: str, look: Callable[[], tuple[T | None, str]]) -> T:
    return Step("e2e").wait(what, look, DEADLINE)


def ready(obj: dict[str, Any]) -> bool:
    return is_true(obj, "Ready")


def restarts(pods: list[dict[str, Any]]) -> int:
    return sum(status["restartCount"] for pod in pods for status in pod["status"]["containerStatuses"])
