"""kubectl, as a user would type it: the demo does nothing that its reader could not do by hand."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .steps import StepError

Object = dict[str, Any]


@dataclass(frozen=True)
class Kubectl:
    """`program`, a kubeconfig (None: the caller's own) and a namespace."""

    program: Path | str
    kubeconfig: Path | None = None
    namespace: str = "default"

    def within(self, namespace: str) -> Kubectl:
        return replace(self, namespace=namespace)

    def command(self, *words: str) -> list[str]:
        config = ["--kubeconfig", str(self.kubeconfig)] if self.kubeconfig else []
        return [str(self.program), *config, "--namespace", self.namespace, *words]

    def __call__(self, *words: str, stdin: str | None = None) -> str:
        """What the command printed; raises StepError with its complaint."""
        result = subprocess.run(self.command(*words), input=stdin, capture_output=True, text=True, check=False)
        if result.returncode:
            raise StepError(f"`kubectl {' '.join(words)}`: {result.stderr.strip() or result.stdout.strip()}")
        return result.stdout

    def get(self, *words: str) -> Object | None:
        """One object, or a list as its List; None when it is not there."""
        text = self("get", *words, "--output", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def items(self, *words: str) -> list[Object]:
        return list((self.get(*words) or {}).get("items", []))

    def apply(self, *objects: Object) -> None:
        self("apply", "--filename", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def condition(obj: Object | None, kind: str) -> Object:
    """A condition of an object's status; {} while it has none, or one of an older generation."""
    if obj is None:
        return {}
    generation = obj["metadata"].get("generation")
    for found in obj.get("status", {}).get("conditions", []):
        if found["type"] == kind and found.get("observedGeneration", generation) == generation:
            return dict(found)
    return {}


def is_true(obj: Object | None, kind: str) -> bool:
    return condition(obj, kind).get("status") == "True"


def stands_at(obj: Object | None, kind: str) -> str:
    """A condition in words, to show while waiting for it."""
    found = condition(obj, kind)
    return f"{kind} {found['status']} {found['reason']}: {found.get('message', '')}" if found else f"no {kind} yet"
