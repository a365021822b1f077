"""Which module runs a model: our own layers where we have them, transformers' otherwise."""

from __future__ import annotations

import torch

from outrider_runtime.models.causal import CausalLM
from outrider_runtime.models.config import ModelConfig
from outrider_runtime.models.llama import LlamaForCausalLM


def make_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """Its weights are still to be read. Raises Refusal(UnsupportedModel)."""
    if config.transformers is None:
        return LlamaForCausalLM(config, dtype, device)
    from outrider_runtime.models.generic import GenericForCausalLM  # imports transformers, which takes seconds

    return GenericForCausalLM(config, dtype, device)
