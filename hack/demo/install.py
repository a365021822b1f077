"""Installs the operator from manifests/install, with this build's images in place of the released ones."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import images
from .cluster import Cluster
from .kubectl import Kubectl
from .steps import ROOT, Step

NAMESPACE = "outrider-system"
NAME = "outrider-operator"
OPERATOR = f"deployment/{NAME}"
SELECTOR = f"app.kubernetes.io/name={NAME}"


def install(step: Step, cluster: Cluster) -> None:
    """`kubectl apply -k manifests/install`, then wait until the operator's Deployment is complete."""
    system = cluster.kubectl.within(NAMESPACE)
    with overlay() as folder:
        system("apply", "--server-side", "--force-conflicts", "--kustomize", str(folder))
    if cluster.local and images.replace_stale_pods(system, SELECTOR, images.OPERATOR):
        step.say("a new build of the operator takes over")
    step.wait("operator available", lambda: available(system), 120)


@contextmanager
def overlay() -> Iterator[Path]:
    """The folder to apply: manifests/install itself, or one over it when the caller names other images."""
    if not images.RENAMED:
        yield ROOT / "manifests/install"
        return
    name, _, tag = images.OPERATOR.rpartition(":")
    kustomization = {
        "resources": ["../install"],
        "images": [{"name": "localhost/outrider-operator", "newName": name, "newTag": tag}],
        "configMapGenerator": [
            {"name": f"{NAME}-settings", "behavior": "merge", "literals": [f"OUTRIDER_RUNTIME_IMAGE={images.RUNTIME}"]}
        ],
        "namespace": NAMESPACE,
    }
    with tempfile.TemporaryDirectory(dir=ROOT / "manifests", prefix=".demo-") as folder:
        (Path(folder) / "kustomization.yaml").write_text(json.dumps(kustomization))
        yield Path(folder)


def available(system: Kubectl) -> tuple[bool | None, str]:
    """Whether the current template's pods run and no others; None while not."""
    # both kinds by one call: kubectl takes a third of a second of CPU that the new pod is waiting for
    objects = system.items("deployments,pods", "--selector", SELECTOR)
    deployment = next((obj for obj in objects if obj["kind"] == "Deployment"), None)
    if deployment is None:
        return None, "not installed"
    status, wanted = deployment.get("status", {}), deployment["spec"]["replicas"]
    current = status.get("observedGeneration") == deployment["metadata"]["generation"]
    counts = [status.get(field, 0) for field in ("replicas", "updatedReplicas", "availableReplicas")]
    # a pod on its way out may still hold the Lease
    stopping = any("deletionTimestamp" in obj["metadata"] for obj in objects)
    done = current and counts == [wanted] * 3 and not stopping
    return (True if done else None), f"{counts[2]} of {wanted} replicas available"
