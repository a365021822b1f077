"""Whether a live object still holds what we rendered: every field we own, compared as the API server would store it.

The hash on a child says whether our own mind changed, not whether somebody changed the object; this says the latter.
Fields of the live object that we did not render are defaults or other people's, and none of our business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

# lists that the API server merges by key (listType=map): others may add items of their own to them
_MERGED_BY: Mapping[str, tuple[str, ...]] = {
    "ownerReferences": ("uid",),
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "ports": ("containerPort", "port", "protocol"),
}
_DEFAULTS: Mapping[str, Any] = {"protocol": "TCP"}  # of list keys
_QUANTITIES = frozenset({"limits", "requests"})
_QUANTITY_FIELDS = frozenset({"sizeLimit", "storage"})
_QUANTITY = re.compile(r"([+-]?[0-9.]+)(|[numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)")
_SUFFIXES = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def differences(rendered: Any, live: Any, path: str = "") -> list[str]:
    """Paths of the rendered fields that the live object does not hold; empty when it is in step.

    Both are plain JSON: asking for dict and list themselves is several times faster than for their abstract bases.
    """
    if rendered == live:
        return []
    if isinstance(rendered, dict):
        if not isinstance(live, dict):
            return [] if live is None and _empty(rendered) else [path]
        found: list[str] = []
        for name, value in rendered.items():
            theirs = live.get(name)
            if value != theirs:
                found += _field(name, value, theirs, f"{path}.{name}" if path else name)
        return found
    if isinstance(rendered, list):
        return _atomic(rendered, live, path)
    return [] if live is None and _empty(rendered) else [path]


def _field(name: str, rendered: Any, live: Any, path: str) -> list[str]:
    if name in _QUANTITIES and isinstance(rendered, dict) and isinstance(live, dict):
        return [f"{path}.{key}" for key, amount in rendered.items() if not _same_quantity(amount, live.get(key))]
    if name in _QUANTITY_FIELDS and rendered is not None:
        return [] if _same_quantity(rendered, live) else [path]
    if name in _MERGED_BY and isinstance(rendered, list):
        return _merged(_MERGED_BY[name], rendered, live or [], path)
    return differences(rendered, live, path)


def _merged(keys: tuple[str, ...], rendered: list[Any], live: list[Any], path: str) -> list[str]:
    def identity(item: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(item.get(key, _DEFAULTS.get(key)) for key in keys)

    there = {identity(item): item for item in live}
    return [
        difference
        for item in rendered
        for difference in differences(item, there.get(identity(item)), f"{path}[{item.get(keys[0], '')}]")
    ]


def _atomic(rendered: list[Any], live: Any, path: str) -> list[str]:
    there = live or []
    if len(rendered) != len(there):
        return [path]
    return [
        difference
        for index, (mine, other) in enumerate(zip(rendered, there, strict=True))
        for difference in differences(mine, other, f"{path}[{index}]")
    ]


def _empty(value: Any) -> bool:
    """What Go's omitempty leaves out."""
    if isinstance(value, dict):
        return all(_empty(each) for each in value.values())
    return value is None or value is False or value == 0 or value == "" or value == []


def _same_quantity(one: Any, other: Any) -> bool:
    return one == other or (other is not None and quantity(one) is not None and quantity(one) == quantity(other))


def quantity(value: Any) -> Decimal | None:
    """A resource.Quantity as a number, None if it is not one: "1Gi" is 1073741824, "500m" is 0.5."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        return None
    try:
        number, suffix = Decimal(match[1]), match[2]
    except ArithmeticError:
        return None
    if suffix.endswith("i"):
        return number * Decimal(1024) ** ("KMGTPE".index(suffix[0]) + 1)
    if suffix in _SUFFIXES:
        return number.scaleb(_SUFFIXES[suffix])
    return number.scaleb(int(suffix[1:]))
