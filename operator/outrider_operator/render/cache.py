"""PersistentVolumeClaim NAME-cache: where downloads stay when pods go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_operator.api.v1alpha1 import Cache, SpeculativeModelSpec
from outrider_operator.drift import quantity
from outrider_operator.observe import Model
from outrider_operator.render.meta import cache_name, metadata

ONE_NODE = "ReadWriteOnce"
MANY_NODES = "ReadWriteMany"


def most_replicas(spec: SpeculativeModelSpec) -> int:
    return spec.autoscaling.max_replicas if spec.autoscaling else spec.replicas


def cache_claim(
    model: Model, spec: SpeculativeModelSpec, cache: Cache, live: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The claim. Without an owner when it is to outlive the model; access modes stay as created, being immutable, and
    it stays as large as somebody has made it, since claims do not shrink."""
    wanted = [MANY_NODES if most_replicas(spec) > 1 else ONE_NODE]
    claim: dict[str, Any] = {
        "accessModes": access_modes(live) or wanted,
        "resources": {"requests": {"storage": larger_size(cache, live) or str(cache.size)}},
    }
    if cache.storage_class_name is not None:
        claim["storageClassName"] = cache.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(model, cache_name(model.name), owned=cache.retain is False),
        "spec": claim,
    }


def access_modes(claim: Mapping[str, Any] | None) -> list[str]:
    return list((claim or {}).get("spec", {}).get("accessModes", ()))


def larger_size(cache: Cache, claim: Mapping[str, Any] | None) -> str:
    """What the claim asks for, if that is more than the spec does; else empty."""
    there = (claim or {}).get("spec", {}).get("resources", {}).get("requests", {}).get("storage")
    has, asked = quantity(there), quantity(cache.size)
    return str(there) if has is not None and asked is not None and has > asked else ""
