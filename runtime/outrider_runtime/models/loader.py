"""The one way from a configuration to loaded models: fetch, check, plan memory, load. Refuses before it loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from outrider_runtime.config import EngineConfig
from outrider_runtime.engine.messages import DraftState, LoadedModel
from outrider_runtime.models.config import ModelConfig, model_config
from outrider_runtime.models.llama import LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Model:
    module: LlamaForCausalLM  # on its device, in eval mode, weights loaded
    config: ModelConfig
    loaded: LoadedModel


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that an engine needs. `draft` is None without a draft model or when it was refused; `draft_state` says which.

    A draft may have a shorter context (draft.config.max_position_embeddings) or another padding of the vocabulary
    (draft.config.vocab_size) than the target: past the one it does not draft, and ids past `vocab_size` it must not.
    """

    target: Model
    draft: Model | None
    draft_state: DraftState
    tokenizer_path: Path  # a folder with tokenizer.json and the chat template
    max_model_len: int  # tokens, prompt and answer together
    vocab_size: int  # width of the target's logits
    eos_token_ids: tuple[int, ...]
    num_blocks: int  # KV blocks, each config.cache.block_size tokens in target and draft alike
    device: torch.device
    dtype: torch.dtype


def load(config: EngineConfig, report: Callable[[str], None]) -> Loaded:
    """Load target and draft. `report` gets a line now and then, for logs. Raises Refusal."""
    path = Path(config.model.uri)
    shape = model_config(
        json.loads((path / "config.json").read_text()), json.loads((path / "generation_config.json").read_text())
    )
    device, dtype = torch.device(config.device), torch.float32
    module = LlamaForCausalLM(shape, dtype, device)
    module.load(load_file(path / "model.safetensors").items())
    parameters = sum(p.numel() for p in module.parameters())
    return Loaded(
        target=Model(module, shape, LoadedModel("", parameters, "Float32")),
        draft=None,
        draft_state=DraftState(ok=True, reason="NotRequired"),
        tokenizer_path=path,
        max_model_len=config.max_model_len or shape.max_position_embeddings,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        num_blocks=config.cache.num_blocks or 1024,
        device=device,
        dtype=dtype,
    )
