"""All that can be refused before a weight is read or downloaded: shapes, tokenizers, contexts, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants

from outrider_runtime.config import HEADS, WITH_WEIGHTS, EngineConfig, SourceConfig
from outrider_runtime.engine.messages import DraftState
from outrider_runtime.errors import Refusal
from outrider_runtime.models.checkpoint import Checkpoint, open_checkpoint, open_head, readable, refuse_head
from outrider_runtime.models.config import ModelConfig
from outrider_runtime.models.host import cpu_memory
from outrider_runtime.models.medusa_config import MedusaShape
from outrider_runtime.models.memory import Memory, Plan, parameters, plan
from outrider_runtime.models.pair import check_pair
from outrider_runtime.models.sources import find

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that passed on its own."""

    source: SourceConfig  # its revision the commit that was looked at
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is settled. `draft` is None without a draft model or when it was refused; `draft_state` says which."""

    target: Candidate
    draft: Candidate | None
    draft_state: DraftState
    plan: Plan
    device: torch.device
    dtype: torch.dtype  # of weights and KV cache, in target and draft


def preflight(config: EngineConfig, report: Report, passed: Report) -> Preflight:
    """`passed` gets a line for each check that is passed, `report` those about downloads. Raises Refusal."""
    if config.tensor_parallel_size != 1:
        raise Refusal(
            "UnsupportedParallelism", f"--tensor-parallel-size {config.tensor_parallel_size}; only 1 is supported"
        )
    device, memory = _device(config)
    target = _candidate("target", config, config.model, report, passed)
    dtype = choose_dtype(config, target.checkpoint.config)

    def planned(draft: Candidate | None) -> Plan:
        drafting = draft.checkpoint.config if draft else None
        settled = plan(config, target.checkpoint.config, drafting, dtype.itemsize, memory)
        passed(f"memory: {settled}")
        return settled

    if config.speculation.method in WITH_WEIGHTS:
        try:
            prepare = _head if config.speculation.method in HEADS else _draft
            draft = prepare(config, target, report, passed)
            settled = planned(draft)
        except Refusal as refusal:
            return Preflight(target, None, refused(config, refusal), planned(None), device, dtype)
        note = shorter_context(draft.checkpoint, settled.max_model_len) or other_base(target, draft)
        if note:
            passed(note)
        return Preflight(target, draft, DraftState(True, message=note), settled, device, dtype)
    return Preflight(target, None, DraftState(True, "NotRequired"), planned(None), device, dtype)


def refused(config: EngineConfig, refusal: Refusal) -> DraftState:
    """Plain serving goes on without the draft, unless the policy insists on it."""
    if config.policy.mode == "Enabled":
        raise Refusal("DraftUnavailable", f"mode Enabled needs the draft, which was refused: {refusal}") from refusal
    return DraftState(False, refusal.reason, refusal.message)


def shorter_context(draft: Checkpoint, max_model_len: int) -> str:
    """What happens when the draft reads less than the target does; empty when it does not."""
    context = draft.config.max_position_embeddings
    if context >= max_model_len:
        return ""
    if draft.config.head is not None:
        return (
            f"draft: trained on {context} tokens of the target's {max_model_len}; further on it drafts, too, but fewer "
            "of its tokens may be accepted"
        )
    return f"draft: reads {context} tokens of the target's {max_model_len}; what follows is decoded without drafts"


def other_base(target: Candidate, draft: Candidate) -> str:
    """What happens when heads were taken out of another whole model than the target, of the same shape; empty when they
    were not."""
    head = draft.checkpoint.config.head
    alone = not isinstance(head, MedusaShape) or not head.inside
    if alone or draft.checkpoint.path.resolve() == target.checkpoint.path.resolve():
        return ""
    return (
        f"draft: its heads were trained together with the whole model {draft.source.uri} that they lie in; give that "
        f"as the target, too, unless {target.source.uri} is a copy of it: for another model fewer of their tokens may "
        "be accepted"
    )


def choose_dtype(config: EngineConfig, target: ModelConfig) -> torch.dtype:
    """`auto`: on cuda the checkpoint's; on a CPU float32, where exactness is held and bfloat16 is no faster."""
    name: str = config.dtype
    if name == "auto":
        name = "float32" if config.device == "cpu" else target.dtype
    if name not in DTYPES:
        raise Refusal("UnsupportedModel", f"dtype {name}; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def cache_folder(config: EngineConfig) -> Path:
    return config.download_dir or Path(constants.HF_HUB_CACHE)


def _candidate(role: str, config: EngineConfig, source: SourceConfig, report: Report, passed: Report) -> Candidate:
    cache = cache_folder(config)
    with readable(source.uri):
        found = find(source, cache, report, weights=False)
        if role == "draft":
            refuse_head(source.uri, found.path)
        checkpoint = open_checkpoint(source.uri, found.path, cache / "tokenizers")
        checkpoint.vocabulary()
        if found.complete:
            checkpoint.weights()
    shape = checkpoint.config
    passed(
        f"{role}: {shape.architecture}, {parameters(shape) / 1e6:.1f} M parameters, vocabulary {shape.vocab_size}, "
        f"context {shape.max_position_embeddings}, {source.uri}{f' at {found.revision}' if found.revision else ''}"
    )
    return Candidate(SourceConfig(source.uri, found.revision or None), checkpoint)


def _draft(config: EngineConfig, target: Candidate, report: Report, passed: Report) -> Candidate:
    if config.speculation.draft is None:
        raise Refusal("InvalidArgument", "method draft-model needs --draft-model")
    draft = _candidate("draft", config, config.speculation.draft, report, passed)
    check_pair(target.checkpoint, draft.checkpoint)
    passed("tokenizers: the same token behind every id both can emit")
    ends = [checkpoint.config.eos_token_ids for checkpoint in (target.checkpoint, draft.checkpoint)]
    passed(
        f"end tokens: {list(ends[0])}" + ("" if ends[0] == ends[1] else f"; the draft's {list(ends[1])} are not used")
    )
    return draft


def _head(config: EngineConfig, target: Candidate, report: Report, passed: Report) -> Candidate:
    """Its weights are fetched at once: which tensors there are decides what it is."""
    source, method = config.speculation.draft, config.speculation.method
    if source is None:
        raise Refusal("InvalidArgument", f"method {method} needs --draft-model")
    cache = cache_folder(config)
    with readable(source.uri):
        found = find(source, cache, report)
        head = open_head(source.uri, found.path, method, target.checkpoint)
        head.weights()
    shape, known = head.config, len(target.checkpoint.vocabulary())
    if shape.vocab_size < known:
        raise Refusal(
            "TokenizerMismatch",
            f"draft {source.uri} knows {shape.vocab_size} tokens, the tokenizer of target {target.source.uri} has "
            f"{known}; give the head that was trained for this target",
        )
    passed(
        f"draft: {shape.head}, {parameters(shape) / 1e6:.1f} M parameters, "
        f"{source.uri}{f' at {found.revision}' if found.revision else ''}"
    )
    return Candidate(SourceConfig(source.uri, found.revision or None), head)


def _device(config: EngineConfig) -> tuple[torch.device, Memory]:
    device = torch.device(config.device)
    if device.type == "cpu":
        return device, cpu_memory()
    if not torch.cuda.is_available():
        raise Refusal("InvalidArgument", "--device cuda: no CUDA device is visible; ask for nvidia.com/gpu or use cpu")
    free, total = torch.cuda.mem_get_info(device)
    return device, Memory(total, free)
