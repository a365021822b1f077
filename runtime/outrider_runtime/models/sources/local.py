"""Models that are files already: pvc://CLAIM/PATH under the folder where claims are mounted, or any path."""

from __future__ import annotations

import os
from pathlib import Path

from outrider_runtime.config import SourceConfig
from outrider_runtime.errors import Refusal
from outrider_runtime.models.sources.found import Found

CLAIM = "pvc://"


def find(source: SourceConfig) -> Found:
    if source.uri.startswith(CLAIM):
        root = Path(os.environ.get("OUTRIDER_PVC_ROOT", "/mnt/models"))
        path = root / source.uri.removeprefix(CLAIM)
        if ".." in path.parts:
            raise Refusal("InvalidArgument", f"{source.uri}: '..' is not allowed in it")
        fix = "mount the claim that holds it or correct model.uri"
    elif "://" in source.uri:
        raise Refusal("InvalidArgument", f"{source.uri}: give hf://ORG/NAME, pvc://CLAIM/PATH, a folder or a GGUF file")
    else:
        path = Path(source.uri).expanduser()
        fix = "correct the path"
    if not path.exists():
        what = "file" if path.suffix == ".gguf" else "folder"
        raise Refusal("ModelNotFound", f"{source.uri}: no such {what}; {fix}")
    if path.is_file() and path.suffix != ".gguf":
        raise Refusal("UnsupportedModel", f"{source.uri} is a file but no .gguf; give the folder it lies in")
    return Found(path)
