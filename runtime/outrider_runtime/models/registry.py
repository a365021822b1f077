"""Which module runs a model: our own layers where we have them, transformers' otherwise."""

from __future__ import annotations

import torch

from outrider_runtime.models.causal import CausalLM, Weighted
from outrider_runtime.models.config import ModelConfig
from outrider_runtime.models.eagle import EagleHead
from outrider_runtime.models.eagle_config import EagleShape
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.models.medusa import MedusaHeads


def make_draft(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Weighted:
    """A model, or a head of another one. Its weights are still to be read. Raises Refusal(UnsupportedModel)."""
    if config.head is None:
        return make_model(config, dtype, device)
    return (EagleHead if isinstance(config.head, EagleShape) else MedusaHeads)(config, dtype, device)


def make_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """Its weights are still to be read. Raises Refusal(UnsupportedModel)."""
    if config.transformers is None:
        return LlamaForCausalLM(config, dtype, device)
    from outrider_runtime.models.generic import GenericForCausalLM  # imports transformers, which takes seconds

    return GenericForCausalLM(config, dtype, device)
