"""The one way from a configuration to loaded models: find, compare, plan memory, load. It refuses before it loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants

from outrider_runtime.config import EngineConfig, SourceConfig
from outrider_runtime.engine.messages import DraftState, LoadedModel
from outrider_runtime.errors import Refusal
from outrider_runtime.models.checkpoint import Description, describe, open_weights
from outrider_runtime.models.config import ModelConfig, tensor_shapes
from outrider_runtime.models.host import cpu_memory
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.models.memory import Memory, Plan, parameters, plan
from outrider_runtime.models.pair import check_pair
from outrider_runtime.models.sources import find
from outrider_runtime.models.weights import reading

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_API_DTYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32"}

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Model:
    module: LlamaForCausalLM  # on its device, weights loaded
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


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is settled before any weight is read. `draft` is None without a draft model or when it was refused."""

    target: Description
    draft: Description | None
    draft_state: DraftState
    plan: Plan
    device: torch.device
    dtype: torch.dtype


def load(config: EngineConfig, report: Report) -> Loaded:
    """Load target and draft. `report` gets a line now and then, for logs. Raises Refusal."""
    ready = preflight(config, report)
    try:
        target = _load(config, config.model, ready.target, ready, report)
        draft, draft_state = None, ready.draft_state
        if ready.draft is not None and config.speculation.draft is not None:
            try:
                draft = _load(config, config.speculation.draft, ready.draft, ready, report)
                draft_state = DraftState(True, message=draft_state.message, model=draft.loaded)
            except Refusal as refusal:
                draft_state = refused_draft(config, refusal)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Refusal(
            "OutOfMemory",
            "the device ran out of memory while loading; "
            "lower engine.memoryUtilizationPercent or engine.maxModelLength",
        ) from error
    return Loaded(
        target=target,
        draft=draft,
        draft_state=draft_state,
        tokenizer_path=ready.target.tokenizer,
        max_model_len=ready.plan.max_model_len,
        vocab_size=ready.target.config.vocab_size,
        eos_token_ids=ready.target.config.eos_token_ids,
        num_blocks=ready.plan.num_blocks,
        device=ready.device,
        dtype=ready.dtype,
    )


def preflight(config: EngineConfig, report: Report) -> Preflight:
    """Everything that can be refused without reading, or downloading, a single weight."""
    if config.tensor_parallel_size != 1:
        raise Refusal(
            "UnsupportedParallelism", f"--tensor-parallel-size {config.tensor_parallel_size}; only 1 is supported"
        )
    device, memory = _device(config)
    target = _describe(config, config.model, report)
    target.vocabulary()
    dtype = choose_dtype(config, target.config)
    draft, draft_state = None, DraftState(True, "NotRequired")
    if config.speculation.method == "draft-model":
        try:
            draft = _draft(config, target, report)
            settled = plan(config, target.config, draft.config, dtype.itemsize, memory)
            draft_state = DraftState(True, message=shorter_context(draft, settled.max_model_len))
        except Refusal as refusal:
            draft, draft_state = None, refused_draft(config, refusal)
    if draft is None:
        settled = plan(config, target.config, None, dtype.itemsize, memory)
    report(f"memory: {settled}")
    return Preflight(target, draft, draft_state, settled, device, dtype)


def refused_draft(config: EngineConfig, refusal: Refusal) -> DraftState:
    """Plain serving goes on without the draft, unless the policy insists on it."""
    if config.policy.mode == "Enabled":
        raise Refusal("DraftUnavailable", f"mode Enabled needs the draft, which was refused: {refusal}") from refusal
    return DraftState(False, refusal.reason, refusal.message)


def shorter_context(draft: Description, max_model_len: int) -> str:
    context = draft.config.max_position_embeddings
    if context >= max_model_len:
        return ""
    return f"draft {draft.name} reads {context} tokens of the target's {max_model_len}; what follows is not drafted"


def choose_dtype(config: EngineConfig, target: ModelConfig) -> torch.dtype:
    """The one of target, draft and KV cache. `auto`: on cuda the checkpoint's; on a CPU float32, where exactness
    is held and bfloat16 is not faster."""
    name: str = config.dtype
    if name == "auto":
        name = "float32" if config.device == "cpu" else target.dtype
    if name not in _DTYPES:
        raise Refusal("UnsupportedModel", f"dtype {name}; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _device(config: EngineConfig) -> tuple[torch.device, Memory]:
    device = torch.device(config.device)
    if device.type == "cpu":
        return device, cpu_memory()
    if not torch.cuda.is_available():
        raise Refusal("InvalidArgument", "--device cuda: no CUDA device is visible; ask for nvidia.com/gpu or use cpu")
    free, total = torch.cuda.mem_get_info(device)
    return device, Memory(total, free)


def _draft(config: EngineConfig, target: Description, report: Report) -> Description:
    if config.speculation.draft is None:
        raise Refusal("InvalidArgument", "method draft-model needs --draft-model")
    draft = _describe(config, config.speculation.draft, report)
    check_pair(target, draft)
    return draft


def _cache(config: EngineConfig) -> Path:
    return config.download_dir or Path(constants.HF_HUB_CACHE)


def _describe(config: EngineConfig, source: SourceConfig, report: Report) -> Description:
    cache = _cache(config)
    return describe(source.uri, find(source, cache, report, weights=False).path, cache / "tokenizers")


def _load(
    config: EngineConfig, source: SourceConfig, description: Description, ready: Preflight, report: Report
) -> Model:
    found = find(source, _cache(config), report)
    weights = open_weights(description, found.path)
    module = LlamaForCausalLM(description.config, ready.dtype, ready.device)
    module.load(reading(weights, tensor_shapes(description.config), description.name, report))
    module.eval()
    loaded = LoadedModel(found.revision, parameters(description.config), _API_DTYPES[ready.dtype])
    return Model(module, description.config, loaded)
