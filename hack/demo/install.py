"""Installs the operator from manifests/install, with this build's images in place of the released ones."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from . import images
from .cluster import Cluster
from .kubectl import Kubectl
from .steps import ROOT, Step

NAMESPACE = "outrider-system"
OPERATOR = "deployment/outrider-operator"
SELECTOR = "app.kubernetes.io/name=outrider-operator"


def install(step: Step, cluster: Cluster) -> None:
    """`kubectl apply -k manifests/install`, then wait until the operator's Deployment is complete."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--filename", str(ROOT / "crds"))
    with tempfile.TemporaryDirectory(dir=ROOT / "manifests") as overlay:
        (Path(overlay) / "kustomization.yaml").write_text(json.dumps(kustomization()))
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "--kustomize", overlay)
    system = cluster.kubectl.within(NAMESPACE)
    if cluster.local and images.replace_stale_pods(system, SELECTOR, images.OPERATOR):
        step.say("a new build of the operator takes over")
    wait_for_operator(step, system)
