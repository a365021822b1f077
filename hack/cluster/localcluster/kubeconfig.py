"""Kubeconfigs as values. JSON is YAML too, so no YAML library is needed to write one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def render(server: str, ca_file: Path, user: Mapping[str, str], namespace: str = "default") -> str:
    """A kubeconfig of one context; `user` as in its `users[].user`, like {"token": …}."""
    name = "outrider"
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority": str(ca_file)}}],
            "users": [{"name": name, "user": dict(user)}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}],
        },
        indent=1,
    )


def write_secret(path: Path, text: str) -> Path:
    """Write `text` readable by its owner alone, never for a moment by others; all or nothing."""
    spare = path.with_name(f".{path.name}.new")
    spare.unlink(missing_ok=True)
    with os.fdopen(os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    spare.replace(path)
    return path
