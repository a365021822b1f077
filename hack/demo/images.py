"""Builds the two images, brings them to the cluster, and replaces pods that still run an older build."""

from __future__ import annotations

import os
import subprocess

from .cluster import Cluster
from .kubectl import Kubectl
from .steps import HOME, ROOT, Step

# The names in manifests/install; other ones, for a cluster that pulls, come from the environment.
DEFAULTS = {"operator": "localhost/outrider-operator:dev", "runtime": "localhost/outrider-runtime:dev"}
IMAGES = {target: os.environ.get(f"{target.upper()}_IMAGE") or name for target, name in DEFAULTS.items()}
OPERATOR, RUNTIME = IMAGES["operator"], IMAGES["runtime"]
RENAMED = IMAGES != DEFAULTS


def build(step: Step, cluster: Cluster) -> str:
    """Build both, minutes the first time, seconds when only our code changed; says in words what there is."""
    if not cluster.local:
        return f"using {OPERATOR} and {RUNTIME}: the cluster must be able to pull them"
    step.run(ROOT / "hack/image/build.sh", *(f"{target}={image}" for target, image in IMAGES.items()))
    return "built"


def load(step: Step, cluster: Cluster) -> str:
    """Bring both to the local cluster's node; a foreign one pulls them."""
    if not cluster.local:
        return "pulled by the cluster"
    cluster.load(step, *IMAGES.values())
    (HOME.root / "demo/loaded").touch()
    return "on the node"


def identity(image: str) -> str:
    """The image's ID, 64 hex digits; what a pod's status calls its imageID ends with it."""
    command = [str(ROOT / "hack/image/buildah"), "inspect", "--type", "image", "--format", "{{.FromImageID}}", image]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def replace_stale_pods(kubectl: Kubectl, selector: str, image: str) -> int:
    """Delete pods that run another build under the image's name; their owners make them anew. Returns how many."""
    wanted, stale = identity(image), []
    for pod in kubectl.items("pods", "--selector", selector):
        statuses = pod.get("status", {}).get("containerStatuses", [])
        if any(s["image"] == image and s["imageID"] and not s["imageID"].endswith(wanted) for s in statuses):
            stale.append(pod["metadata"]["name"])
    if stale:
        kubectl("delete", "pod", "--wait=false", *stale)
    return len(stale)
