"""The memory plan: what goes where on the device, in bytes, decided before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from outrider_runtime.config import EngineConfig
from outrider_runtime.errors import Refusal
from outrider_runtime.models.config import ModelConfig, tensor_shapes
from outrider_runtime.models.workspace import workspace

CPU_CACHE_SHARE = 1 / 8  # of free memory: a CPU's memory has other users
SHORTEST_CONTEXT = 2048  # tokens; with less room than for one such request the model does not fit


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a device, in bytes."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes, but for the last two. `budget` is what all the others may take together."""

    budget: int
    weights: int
    draft_weights: int
    workspace: int  # what steps need beside (workspace.py)
    block: int  # one KV block, in target and draft
    num_blocks: int
    max_model_len: int

    def __str__(self) -> str:
        draft = f"draft {gigabytes(self.draft_weights)}, " if self.draft_weights else ""
        return (
            f"{gigabytes(self.budget)} to use: weights {gigabytes(self.weights)}, {draft}"
            f"workspace {gigabytes(self.workspace)}, KV cache {gigabytes(self.block * self.num_blocks)} "
            f"in {self.num_blocks} blocks; requests of up to {self.max_model_len} tokens"
        )


def plan(config: EngineConfig, target: ModelConfig, draft: ModelConfig | None, itemsize: int, memory: Memory) -> Plan:
    """`itemsize`: bytes of a weight and of a KV element. Raises Refusal(DoesNotFit or InvalidArgument).

    Without a max_model_len the model's own context is offered as far as the KV cache can hold it.
    """
    own, asked, size = target.max_position_embeddings, config.max_model_len, config.cache.block_size
    if asked is not None and asked > own:
        raise Refusal("InvalidArgument", f"max model length {asked} is more than the model's own {own}; lower it")
    longest = own if asked is None else asked  # tokens of one request
    needed = min(own, SHORTEST_CONTEXT) if asked is None else asked

    budget = _budget(config, memory)
    weights, draft_weights = parameters(target) * itemsize, parameters(draft) * itemsize if draft else 0
    needs = workspace(config, target, draft, itemsize, longest)
    block = size * sum(kv_bytes(model, itemsize) for model in (target, draft) if model)
    left = budget - weights - draft_weights - needs
    least = blocks(needed, size) if config.cache.num_blocks is None else config.cache.num_blocks
    if left < least * block:
        raise Refusal(
            "DoesNotFit",
            f"weights {gigabytes(weights)} + {f'draft {gigabytes(draft_weights)} + ' if draft else ''}"
            f"workspace {gigabytes(needs)} + KV cache of {least * size} tokens {gigabytes(least * block)} "
            f"of {gigabytes(max(0, budget))}; use a larger {'GPU' if config.device == 'cuda' else 'machine'}, "
            "a smaller model or a shorter engine.maxModelLength",
        )

    if config.cache.num_blocks is not None:
        num_blocks = config.cache.num_blocks
    elif config.device == "cuda":
        num_blocks = left // block
    else:
        useful = config.scheduler.max_concurrency * blocks(longest, size)
        num_blocks = max(least, min(useful, left // block, int(memory.free * CPU_CACHE_SHARE) // block))
    if asked is not None and asked > num_blocks * size:
        raise Refusal(
            "InvalidArgument",
            f"max model length {asked} is more than the {num_blocks * size} tokens of {num_blocks} KV blocks; "
            "lower it or give more blocks",
        )
    return Plan(budget, weights, draft_weights, needs, block, num_blocks, min(longest, num_blocks * size))


def parameters(model: ModelConfig) -> int:
    return sum(prod(shape) for shape in tensor_shapes(model).values())


def kv_bytes(model: ModelConfig, itemsize: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize


def blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _budget(config: EngineConfig, memory: Memory) -> int:
    """On a GPU the share is of all memory, and what others hold of it is lost to us; on a CPU it is of what is free."""
    share = config.cache.memory_utilization
    if config.device == "cuda":
        return int(memory.total * share) - (memory.total - memory.free)
    return int(memory.free * share)
