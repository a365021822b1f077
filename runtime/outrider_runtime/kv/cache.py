"""A model's KV arrays: keys and values of every layer, addressed by slot."""

from __future__ import annotations

import torch

from outrider_runtime.models.config import ModelConfig


class KVCache:
    """Slot = block x block size + offset. Target and draft have one each, over the same block ids. One block more
    than there are takes what belongs `nowhere`: padding, and drafts that no block is left for."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.block_size = block_size
        self.dim = config.head_dim
        self.nowhere = num_blocks * block_size  # a slot
        shape = (config.num_layers, 2, (num_blocks + 1) * block_size, config.num_kv_heads, config.head_dim)
        # Zeros, since attention multiplies what lies beyond a context by nothing, and nothing times NaN is NaN.
        self.arrays = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [(layer[0], layer[1]) for layer in self.arrays]
