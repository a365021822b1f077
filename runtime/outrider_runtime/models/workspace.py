"""What a step needs beside weights and KV cache, in bytes. An estimate from above: what is left over stays unused."""

from __future__ import annotations

from outrider_runtime.config import EngineConfig
from outrider_runtime.models.config import ModelConfig
from outrider_runtime.sampling.table import Layout

# What CUDA keeps beside tensors once a device is in use: the kernels' code, cuBLAS's workspace (32 MiB on Hopper) and
# the nodes of hundreds of graphs.
CUDA_OVERHEAD = 750_000_000
# In float32: of each program that attends for few queries, two parts of contexts that are split (kernels/attention.py).
# GPUs have up to 188 processors, each with programs for 128 rows of queries.
ATTENTION_ROWS = 192 * 128 * 2
SAMPLED_AT_ONCE = 1 << 24, 8  # logits that the whole pipeline works on, and bytes for each (kernels/sampling.py)
CPU_SAMPLED_AT_ONCE = 1 << 23, 48  # the same in torch, with all its temporaries (sampling/pipeline.py)


def workspace(
    config: EngineConfig, target: ModelConfig, draft: ModelConfig | None, itemsize: int, max_model_len: int
) -> int:
    """For requests of up to `max_model_len` tokens. On a GPU each program runs once before it is captured, in memory
    that captured ones cannot have, so the widest counts twice."""
    rows = sampled_rows(config)
    programs = [_body(config, target, itemsize), _head(config, target, rows, itemsize)]
    if draft is not None:
        requests = config.scheduler.max_concurrency
        programs += [_body(config, draft, itemsize), _head(config, draft, requests, itemsize)]
    kept = _state(config, target, itemsize, max_model_len) + _followed(config, target, draft, itemsize)
    if config.device == "cuda":
        return kept + 2 * max(programs) + CUDA_OVERHEAD
    return kept + max(programs)


def sampled_rows(config: EngineConfig) -> int:
    """Of the widest step: each request's token and the drafts to verify behind it."""
    tokens, requests = config.scheduler.max_batched_tokens, config.scheduler.max_concurrency
    return min(tokens, requests * (1 + config.speculation.most_drafts))


def _state(config: EngineConfig, target: ModelConfig, itemsize: int, max_model_len: int) -> int:
    """By slot: texts, block tables and sampling parameters; and what one program leaves for the next."""
    slots = config.scheduler.max_concurrency + 1
    width = max_model_len + 2 * (1 + config.speculation.most_drafts) + 1
    words = width + -(-width // config.cache.block_size) + Layout().width
    return 4 * slots * words + config.scheduler.max_batched_tokens * (target.hidden_size * itemsize + 4)


def _followed(config: EngineConfig, target: ModelConfig, draft: ModelConfig | None, itemsize: int) -> int:
    """What the target keeps for a head: the inputs of its tapped layers, and a state by slot."""
    if draft is None or draft.head is None:
        return 0
    tapped = config.scheduler.max_batched_tokens * len(draft.head.tapped) * target.hidden_size
    return (tapped + (config.scheduler.max_concurrency + 1) * draft.hidden_size) * itemsize


def _body(config: EngineConfig, model: ModelConfig, itemsize: int) -> int:
    """A layer over a full batch: the residual and its norm, the feed-forward's two halves and their product, queries,
    keys and values, and what attention has of each."""
    attention = model.num_heads * model.head_dim
    elements = 2 * model.hidden_size + 3 * model.intermediate_size
    elements += 2 * attention + 2 * model.num_kv_heads * model.head_dim
    if model.head is not None:
        elements += 3 * model.hidden_size  # its pairs, and what it begins with
    parts = 4 * ATTENTION_ROWS * model.head_dim if config.device == "cuda" else 0
    return config.scheduler.max_batched_tokens * elements * itemsize + parts


def _head(config: EngineConfig, model: ModelConfig, rows: int, itemsize: int) -> int:
    logits = rows * model.vocab_size * (1 if model.head is None else 2)  # a head's may be spread over the target's
    at_once, each = SAMPLED_AT_ONCE if config.device == "cuda" else CPU_SAMPLED_AT_ONCE
    return logits * itemsize + min(logits, max(at_once, model.vocab_size)) * each
