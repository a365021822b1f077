"""The user's podTemplate over ours: merged by key where Kubernetes has keys, replaced elsewhere, refused where the
operator would no longer know what it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_operator import labels
from outrider_operator.api.reasons import Reason
from outrider_operator.engine import CONTAINER
from outrider_operator.errors import Refused

_ROOT = "podTemplate"
# lists whose items have a key, and what it is; an item of a known key replaces ours, another is added
_ITEMS = {"env": "name", "volumeMounts": "mountPath"}
_OURS = ("command", "args", "ports", "startupProbe", "readinessProbe", "livenessProbe")


def overlaid(template: Mapping[str, Any], overlay: Mapping[str, Any] | None) -> dict[str, Any]:
    """`template` with `overlay` merged in; a null removes a field.

    Raises Refused (PodTemplateRefused) naming the path of what may not be touched or has the wrong shape.
    """
    result = dict(template)
    for name, value in (overlay or {}).items():
        path = f"{_ROOT}.{name}"
        if name == "metadata":
            result[name] = _metadata(template["metadata"], _mapping(value, path), path)
        elif name == "spec":
            result[name] = _spec(template["spec"], _mapping(value, path), path)
        else:
            raise _refused(path, "is not a field of a pod template; give metadata or spec")
    return result


def _metadata(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> dict[str, Any]:
    result = dict(ours)
    for name, value in theirs.items():
        if name not in ("labels", "annotations"):
            raise _refused(f"{path}.{name}", "cannot be set; give labels or annotations")
        added = _mapping(value, f"{path}.{name}")
        for key, text in added.items():
            if name == "labels" and key in (labels.MODEL, labels.TEMPLATE):
                raise _refused(f"{path}.labels[{key}]", "selects the model's pods; remove it")
            if not isinstance(text, str):
                raise _refused(f"{path}.{name}[{key}]", "must be a string")
        result[name] = {**ours.get(name, {}), **added}
    return result


def _spec(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> dict[str, Any]:
    result = dict(ours)
    for name, value in theirs.items():
        here = f"{path}.{name}"
        if name in ("containers", "initContainers"):
            result[name] = _containers(ours.get(name, []), value, here)
        elif name == "volumes":
            result[name] = _items(ours.get(name, []), value, "name", here)
        else:
            _replace(result, name, value)
    return result


def _containers(ours: list[dict[str, Any]], theirs: object, path: str) -> list[dict[str, Any]]:
    result = {container["name"]: container for container in ours}
    for name, container in _keyed(theirs, "name", path).items():
        here = f"{path}[{name}]"
        if name == CONTAINER:
            for field in _OURS:
                if field in container:
                    raise _refused(f"{here}.{field}", _advice(field))
        result[name] = _container(result.get(name, {}), container, here)
    return list(result.values())


def _container(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> dict[str, Any]:
    result = dict(ours)
    for name, value in theirs.items():
        if name in _ITEMS:
            result[name] = _items(ours.get(name, []), value, _ITEMS[name], f"{path}.{name}")
        else:
            _replace(result, name, value)
    return result


def _items(ours: list[dict[str, Any]], theirs: object, key: str, path: str) -> list[dict[str, Any]]:
    return list({**{item[key]: item for item in ours}, **_keyed(theirs, key, path)}.values())


def _replace(result: dict[str, Any], name: str, value: object) -> None:
    if value is None:
        result.pop(name, None)
    else:
        result[name] = value


def _keyed(value: object, key: str, path: str) -> dict[str, dict[str, Any]]:
    """A list of objects by their key, the last of a key winning."""
    if not isinstance(value, list):
        raise _refused(path, "must be a list")
    result = {}
    for number, item in enumerate(value):
        mapping = _mapping(item, f"{path}[{number}]")
        name = mapping.get(key)
        if not isinstance(name, str) or not name:
            raise _refused(f"{path}[{number}].{key}", "is needed: it says what the rest is merged with")
        result[name] = dict(mapping)
    return result


def _mapping(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused(path, "must be an object")
    return value


def _advice(field: str) -> str:
    if field in ("command", "args"):
        return "belongs to the operator; give further arguments as engine.extraArgs"
    return "belongs to the operator; remove it"


def _refused(path: str, message: str) -> Refused:
    return Refused(Reason.POD_TEMPLATE_REFUSED, f"{path} {message}")
