"""Llama, Mistral, Qwen2 and Qwen3: one module, told apart by config alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from outrider_runtime.models.config import ModelConfig


class LlamaForCausalLM(nn.Module):
    """Weights are uninitialised until load()."""

    config: ModelConfig

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        raise NotImplementedError

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors, named as Hugging Face names them, converting their dtype.

        Raises Refusal(UnsupportedModel) naming what is missing, unexpected or of another shape.
        """
        raise NotImplementedError
