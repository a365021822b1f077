"""What the tests of this folder hold: a namespace of a real cluster, and how to look at an object in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
SAMPLE = ROOT / "manifests/samples/demo.yaml"


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

    def apply(self, name: str, change: Callable[[dict[str, Any]], None] = lambda spec: None) -> None:
        """The demo's object under another name, its spec changed in place by `change`."""
        obj = yaml.safe_load(SAMPLE.read_text())
        obj["metadata"] = {"name": name, "namespace": self.kubectl.namespace}
        obj["spec"]["resources"]["requests"] = {"cpu": "100m", "memory": "1Gi"}
        obj["spec"]["rollout"] = {"drainTimeoutSeconds": DRAIN}
        change(obj["spec"])
        # server-side, so that a field left out now is taken back, also when another test had set it
        self.kubectl("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=json.dumps(obj))

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
