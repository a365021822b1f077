"""Tiny random models for tests: ours, and transformers' own with the same weights to compare with."""

from __future__ import annotations

from functools import cache

import torch
import transformers

from outrider_runtime.models.config import model_config
from outrider_runtime.models.llama import LlamaForCausalLM

VOCAB = 61  # odd, so that nothing is aligned by chance

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # logits far enough apart that rounding does not reorder them
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def reference_model(architecture: str = "LlamaForCausalLM", seed: int = 0, **changes) -> transformers.PreTrainedModel:
    model_class = getattr(transformers, architecture)
    torch.manual_seed(seed)
    config = model_class.config_class(**{**_SHAPE, **changes}, architectures=[architecture])
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases: not the ones and zeros they are born with
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def ours(
    reference: transformers.PreTrainedModel, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> LlamaForCausalLM:
    model = LlamaForCausalLM(model_config(reference.config.to_dict()), dtype, device)
    model.load(reference.state_dict().items())
    return model


def blurred_model() -> transformers.PreTrainedModel:
    """The tiny Llama with its weights blurred: agrees with it often, not always. Its vocabulary is padded further."""
    blurred = reference_model()
    blurred.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in blurred.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return blurred


@cache
def tiny_pair(seed: int = 0) -> tuple[transformers.PreTrainedModel, LlamaForCausalLM]:
    """The same tiny Llama twice: transformers' and ours."""
    reference = reference_model(seed=seed)
    return reference, ours(reference)
