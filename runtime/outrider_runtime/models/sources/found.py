"""What a source answers with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Found:
    path: Path  # a folder of Hugging Face's layout, or a GGUF file
    revision: str = ""  # the hub's commit; empty for what has none
    complete: bool = True  # False: what describes the model is here, its weights may not be
