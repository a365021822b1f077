"""Whose a child is. Ours are the objects that the SpeculativeModel controls, and those we made that nobody controls:
a claim left behind to be found again, or children orphaned by hand. All else is somebody else's and never taken over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_operator import labels
from outrider_operator.kinds import MODEL
from outrider_operator.observe import Model


def foreign_owner(body: Mapping[str, Any], model: Model) -> str | None:
    """In words, whose the object is when it is not the model's; None when it is."""
    metadata = body["metadata"]
    controller = next((owner for owner in metadata.get("ownerReferences", ()) if owner.get("controller")), None)
    if controller is not None:
        return None if controller.get("uid") == model.uid else f"owned by {controller['kind']} {controller['name']}"
    marks = metadata.get("labels", {})
    made_by_us = marks.get(labels.MANAGED_BY) == labels.FIELD_MANAGER and marks.get(labels.MODEL) == model.name
    return None if made_by_us else "not made by this operator"


def of_predecessor(body: Mapping[str, Any], model: Model) -> bool:
    """Whether it belonged to a deleted SpeculativeModel of the same name, and so is about to be collected."""
    return any(
        owner.get("kind") == MODEL and owner.get("name") == model.name and owner.get("uid") != model.uid
        for owner in body["metadata"].get("ownerReferences", ())
    )
