"""Medusa heads: each a few residual blocks and an output layer, from the target's last hidden state to one token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider_runtime.layers.embedding import Embedding
from outrider_runtime.layers.linear import MergedLinear, linear
from outrider_runtime.models.causal import Weighted
from outrider_runtime.models.config import ModelConfig
from outrider_runtime.models.medusa_config import MedusaShape


class MedusaHeads(Weighted):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(config, dtype, device)
        assert isinstance(config.head, MedusaShape)
        self.shape = shape = config.head
        size = config.hidden_size
        # The first blocks of all heads read the same: one product.
        self.first = MergedLinear(size, {str(head): size for head in range(shape.heads)}, True, dtype, device)
        self.blocks = nn.ModuleList(
            nn.ModuleList(MergedLinear(size, {"linear": size}, True, dtype, device) for _ in range(1, shape.blocks))
            for _ in range(shape.heads)
        )
        self.outputs = nn.ModuleList(Embedding(config.vocab_size, size, dtype, device) for _ in range(shape.heads))

    @torch.inference_mode()
    def states(self, hidden: Tensor, count: int) -> list[Tensor]:
        """[rows, hidden] to what the outputs of the first `count` heads read, [rows, hidden] each."""
        if self.shape.blocks == 0:
            return [hidden] * count
        size, bias = self.config.hidden_size, self.first.bias
        assert bias is not None
        activated = F.silu(linear(hidden, self.first.weight[: count * size], bias[: count * size]))
        states = [hidden + part for part in activated.chunk(count, dim=1)]
        for head, blocks in enumerate(self.blocks[:count]):
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                states[head] = states[head] + F.silu(block(states[head]))
        return states

    @torch.inference_mode()
    def logits(self, head: int, states: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""
        output = self.outputs[head]
        assert isinstance(output, Embedding)
        return output.logits(states)

    def shards(self) -> dict[str, Tensor]:
        shape, size = self.shape, self.config.hidden_size
        shards: dict[str, Tensor] = {}
        for head in range(shape.heads):
            name = f"{shape.prefix}{head}"
            blocks, output = self.blocks[head], self.outputs[head]
            assert isinstance(blocks, nn.ModuleList)
            assert isinstance(output, Embedding)
            assert self.first.bias is not None
            if shape.blocks:
                own = slice(head * size, (head + 1) * size)
                shards |= {
                    f"{name}.0.linear.weight": self.first.weight[own],
                    f"{name}.0.linear.bias": self.first.bias[own],
                }
            for index, block in enumerate(blocks, start=1):
                assert isinstance(block, MergedLinear)
                shards |= block.shards(f"{name}.{index}")
            shards |= output.shards(f"{name}.{shape.blocks}")
        return shards
