"""The kinds the operator deals with: their places in the API, and which of them it watches."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_operator import labels
from outrider_operator.api import v1alpha1

MODEL = v1alpha1.KIND


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    group: str
    version: str
    plural: str
    selector: str = ""  # label selector of lists and watches

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


_ALL = (
    Kind(MODEL, v1alpha1.GROUP, v1alpha1.VERSION, v1alpha1.PLURAL),
    Kind("Deployment", "apps", "v1", "deployments", labels.MODEL),
    Kind("Service", "", "v1", "services", labels.MODEL),
    Kind("ConfigMap", "", "v1", "configmaps", labels.MODEL),
    Kind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims", labels.MODEL),
    Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets", labels.MODEL),
    Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies", labels.MODEL),
    Kind("Pod", "", "v1", "pods", labels.MODEL),
    Kind("Secret", "", "v1", "secrets"),
    Kind("Event", "events.k8s.io", "v1", "events"),
    Kind("Lease", "coordination.k8s.io", "v1", "leases"),
)
KINDS = {kind.name: kind for kind in _ALL}


def watched() -> tuple[Kind, ...]:
    """Secrets are never among them: the operator may get and create single ones, not read what is there. A
    NetworkPolicy is, whatever the setting: one that is no longer wanted can only go when it is seen."""
    return tuple(kind for kind in _ALL if kind.name not in ("Secret", "Event", "Lease"))
