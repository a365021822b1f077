"""Makes the demo's models available to pods: a PersistentVolume over the converted folders, and a claim on it."""

from __future__ import annotations

from .kubectl import Kubectl, Object
from .steps import HOME, Step, StepError

CLAIM = "demo-models"
FOLDER = HOME.root / "models"
SIZE = "4Gi"


def convert(step: Step, python: str) -> None:
    """Download (93 MB, checked), convert and round to 4 bits, unless that was done before."""
    step.run(python, "hack/demo_models.py")


def offer(kubectl: Kubectl, volume: str = CLAIM) -> None:
    """Make `volume` on the node's disk and bind the claim `demo-models` of kubectl's namespace to it."""
    kubectl.apply(*volume_and_claim(volume, kubectl.namespace))


def require_claim(kubectl: Kubectl) -> None:
    """A foreign cluster's disk is not ours: its user brings the claim."""
    if not kubectl.get("pvc", CLAIM):
        raise StepError(
            f"no claim {CLAIM!r} in namespace {kubectl.namespace!r}: make one that holds the two folders of {FOLDER}"
        )


def volume_and_claim(volume: str, namespace: str) -> tuple[Object, Object]:
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeMode": "Filesystem"}
    claim = {"namespace": namespace, "name": CLAIM}
    return (
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **common,
                "capacity": {"storage": SIZE},
                "hostPath": {"path": str(FOLDER), "type": "Directory"},
                "claimRef": claim,
                "persistentVolumeReclaimPolicy": "Retain",
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": claim,
            "spec": {**common, "volumeName": volume, "resources": {"requests": {"storage": SIZE}}},
        },
    )
