"""A short name for content: equal content has an equal digest, whenever and wherever it is computed."""

from __future__ import annotations

import hashlib
import json


def digest(value: object, length: int = 16) -> str:
    """The first hexadecimal digits of a hash over plain data as canonical JSON."""
    content = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:length]
