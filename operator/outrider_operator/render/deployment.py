"""Deployment NAME, and what is recorded on it so that an operator's upgrade or a smaller number rolls no pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider_operator import labels
from outrider_operator.api.v1alpha1 import CAPTURE_TIERS, Device, Quantity, SpeculativeDecoding, SpeculativeModelSpec
from outrider_operator.digest import digest
from outrider_operator.observe import Model
from outrider_operator.render.meta import metadata, selector
from outrider_operator.render.overlay import overlaid
from outrider_operator.render.pod import pod_template

OLD_TEMPLATES = 2  # replica sets kept for `kubectl rollout undo` to look at


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a Deployment was made with: kept until the user asks for something else."""

    image: str
    image_for: str  # hash of what, when changed, takes the operator's default image anew
    tier: int

    def annotations(self) -> dict[str, str]:
        return {
            labels.IMAGE: self.image,
            labels.IMAGE_FOR: self.image_for,
            labels.CAPTURE_TIER: str(self.tier),
        }


def recorded(model: Model, spec: SpeculativeModelSpec, live: Mapping[str, Any] | None, default_image: str) -> Recorded:
    """Image and capture tier for this model, given the Deployment that there is."""
    before = (live or {}).get("metadata", {}).get("annotations") or {}
    # only what the user set: a default that a later version adds must not count as a change
    chosen = spec.engine.model_dump(by_alias=True, mode="json", exclude_defaults=True)
    image_for = digest([chosen, model.annotations.get(labels.UPGRADE, "")])
    kept = before.get(labels.IMAGE) if before.get(labels.IMAGE_FOR) == image_for else None
    return Recorded(
        image=spec.engine.image or kept or default_image,
        image_for=image_for,
        tier=_tier(spec.speculative_decoding, before.get(labels.CAPTURE_TIER, "")),
    )


def _tier(speculation: SpeculativeDecoding, before: str) -> int:
    """The tier there was, if it holds the draft length; but a tree, which is new then, may be too wide for it."""
    needed = speculation.capture_tier
    kept = max(needed, next((tier for tier in CAPTURE_TIERS if str(tier) == before), needed))
    return kept if speculation.tree is None or speculation.tree.fits(kept) else needed


def deployment(model: Model, spec: SpeculativeModelSpec, replicas: int, made_with: Recorded) -> dict[str, Any]:
    """The Deployment. Raises Refused when the user's podTemplate may not be merged."""
    template = overlaid(pod_template(model, spec, made_with.image, made_with.tier), spec.pod_template)
    meta = template["metadata"]
    template = {
        **template,
        "metadata": {**meta, "labels": {**meta["labels"], labels.TEMPLATE: digest(template, 10)}},
    }
    surge, unavailable = rollout_steps(spec)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(model, model.name, annotations=made_with.annotations()),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": selector(model.name)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
            },
            "progressDeadlineSeconds": spec.rollout.progress_deadline_seconds,
            "revisionHistoryLimit": OLD_TEMPLATES,
            "template": template,
        },
    }


def rollout_steps(spec: SpeculativeModelSpec) -> tuple[Quantity, Quantity]:
    """maxSurge and maxUnavailable. There is rarely a spare GPU, so there a pod goes before its successor comes."""
    surge, unavailable = (0, 1) if spec.engine.device is Device.CUDA else (1, 0)
    rollout = spec.rollout
    return (
        surge if rollout.max_surge is None else rollout.max_surge,
        unavailable if rollout.max_unavailable is None else rollout.max_unavailable,
    )


def template_hash(body: Mapping[str, Any] | None) -> str:
    """The template hash that a Deployment, live or rendered, gives its pods."""
    template = (body or {}).get("spec", {}).get("template", {})
    hashed = template.get("metadata", {}).get("labels", {}).get(labels.TEMPLATE, "")
    return str(hashed)
