"""Label, annotation and field-manager names, once."""

from __future__ import annotations

FIELD_MANAGER = "outrider-operator"
REPAIR_MANAGER = f"{FIELD_MANAGER}-repair"  # of what apply alone cannot set right

MODEL = "outrider.dev/model"  # label: the object's name; the selector of everything, for ever
TEMPLATE = "outrider.dev/template"  # pod label: hash of the pod template it was made from
HASH = "outrider.dev/hash"  # child annotation: hash of the object as rendered
IMAGE = "outrider.dev/image"  # Deployment annotation: the default image recorded when it was created
IMAGE_FOR = "outrider.dev/image-for"  # Deployment annotation: hash of what that image was chosen by
CAPTURE_TIER = "outrider.dev/capture-tier"  # Deployment annotation: the tier its runtimes were started for
UPGRADE = "outrider.dev/upgrade"  # SpeculativeModel annotation: a new value takes the operator's default image

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"


def common(name: str) -> dict[str, str]:
    """Labels of every child of the SpeculativeModel `name`."""
    return {
        MODEL: name,
        NAME: "outrider-runtime",
        INSTANCE: name,
        COMPONENT: "inference",
        PART_OF: "outrider",
        MANAGED_BY: FIELD_MANAGER,
    }
