"""The one way from a configuration to loaded models: everything that can be refused is, then the weights are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from outrider_runtime.config import EngineConfig
from outrider_runtime.engine.messages import DraftState, LoadedModel
from outrider_runtime.errors import Refusal
from outrider_runtime.models.causal import CausalLM, Weighted
from outrider_runtime.models.config import ModelConfig
from outrider_runtime.models.memory import parameters
from outrider_runtime.models.preflight import Candidate, Preflight, Report, cache_folder, preflight, refused
from outrider_runtime.models.registry import make_draft, make_model
from outrider_runtime.models.sources import find
from outrider_runtime.models.transfer import fill

T = TypeVar("T", bound=Weighted)

_API_DTYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32"}


@dataclass(frozen=True, slots=True)
class Model(Generic[T]):
    module: T  # on its device, weights loaded
    config: ModelConfig
    loaded: LoadedModel


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that an engine needs. `draft` is None without a draft model or when it was refused; `draft_state` says which.

    A draft may have a shorter context (draft.config.max_position_embeddings) or another padding of the vocabulary
    (draft.config.vocab_size) than the target: past the one it does not draft, and ids past `vocab_size` it must not.
    """

    target: Model[CausalLM]
    draft: Model[Weighted] | None
    draft_state: DraftState
    tokenizer_path: Path  # a folder with tokenizer.json and the chat template
    max_model_len: int  # tokens, prompt and answer together
    vocab_size: int  # width of the target's logits
    eos_token_ids: tuple[int, ...]
    num_blocks: int  # KV blocks, each config.cache.block_size tokens in target and draft alike
    device: torch.device
    dtype: torch.dtype


def load(config: EngineConfig, report: Report) -> Loaded:
    """Load target and draft. `report` gets a line now and then, for logs. Raises Refusal."""
    ready = preflight(config, report, passed=report)
    target = _load(config, ready.target, ready, report, make_model)
    draft, draft_state = None, ready.draft_state
    if ready.draft is not None:
        try:
            draft = _load(config, ready.draft, ready, report, make_draft)
            draft.module.check(target.config)
            draft_state = DraftState(True, message=draft_state.message, model=draft.loaded)
        except Refusal as refusal:
            draft, draft_state = None, refused(config, refusal)
    return Loaded(
        target=target,
        draft=draft,
        draft_state=draft_state,
        tokenizer_path=ready.target.checkpoint.tokenizer,
        max_model_len=ready.plan.max_model_len,
        vocab_size=target.config.vocab_size,
        eos_token_ids=target.config.eos_token_ids,
        num_blocks=ready.plan.num_blocks,
        device=ready.device,
        dtype=ready.dtype,
    )


def _load(
    config: EngineConfig,
    candidate: Candidate,
    ready: Preflight,
    report: Report,
    make: Callable[[ModelConfig, torch.dtype, torch.device], T],
) -> Model[T]:
    found = find(candidate.source, cache_folder(config), report)
    checkpoint = candidate.checkpoint
    module = make(checkpoint.config, ready.dtype, ready.device)
    fill(module.shards(), checkpoint.weights(), checkpoint.name, report)
    module.eval()
    loaded = LoadedModel(found.revision, parameters(checkpoint.config), _API_DTYPES[ready.dtype])
    return Model(module, checkpoint.config, loaded)
