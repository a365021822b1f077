"""What every child has in common: names, labels, the owner, and the hash that says whether it must be sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_operator import labels
from outrider_operator.api.v1alpha1 import API_VERSION, KIND
from outrider_operator.digest import digest
from outrider_operator.observe import Model


def admin_name(model: str) -> str:
    return f"{model}-admin"


def policy_name(model: str) -> str:
    return f"{model}-policy"


def cache_name(model: str) -> str:
    return f"{model}-cache"


def selector(model: str) -> dict[str, str]:
    """The one label that selects a model's pods, for ever: a Deployment's selector cannot be changed."""
    return {labels.MODEL: model}


def metadata(
    model: Model, name: str, *, owned: bool = True, annotations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Metadata of the child `name`. An owned one goes with the model, by garbage collection."""
    marks = labels.common(model.name)
    if not owned:
        # Argo CD takes what has this label and no owner for a part of its Application of that name, and prunes it
        del marks[labels.INSTANCE]
    result: dict[str, Any] = {"name": name, "namespace": model.namespace, "labels": marks}
    if annotations:
        result["annotations"] = dict(annotations)
    if owned:
        result["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": model.name,
                "uid": model.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return result


def sealed(child: Mapping[str, Any]) -> dict[str, Any]:
    """The same child with the hash of its content in its annotations."""
    meta = child["metadata"]
    annotations = {**meta.get("annotations", {}), labels.HASH: digest(child)}
    return {**child, "metadata": {**meta, "annotations": annotations}}
