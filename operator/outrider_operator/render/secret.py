"""Secret NAME-admin: the token the operator shows to pods. Only its shape is rendered here, the token is random."""

from __future__ import annotations

from typing import Any

from outrider_operator.observe import Model
from outrider_operator.render.meta import admin_name, metadata

TOKEN_KEY = "token"


def admin_secret(model: Model) -> dict[str, Any]:
    """The Secret without its data: created once with a fresh token under TOKEN_KEY, never applied over."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": metadata(model, admin_name(model.name)),
    }
