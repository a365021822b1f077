"""Where models come from: a local folder or GGUF file, a mounted claim, the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider_runtime.config import SourceConfig
from outrider_runtime.models.sources import local
from outrider_runtime.models.sources.found import Found

__all__ = ["Found", "find"]


def find(source: SourceConfig, cache: Path, report: Callable[[str], None], weights: bool = True) -> Found:
    """The model on this machine's disk, downloaded into `cache` when it comes from the hub.

    Without `weights` only what describes the model is downloaded. Raises Refusal.
    """
    if source.uri.startswith("hf://"):
        from outrider_runtime.models.sources import hub  # a second to import, and not needed for files

        return hub.find(source, cache, report, weights)
    return local.find(source)
