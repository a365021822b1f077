"""Token embedding, and the output head, which may be the same matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider_runtime.layers.linear import linear
from outrider_runtime.layers.rows import take_rows


class Embedding(nn.Module):
    """A [vocab, hidden] matrix, read both ways."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        shape = (vocab_size, hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[tokens] ids to [tokens, hidden]."""
        return take_rows(self.weight, token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""
        return linear(hidden, self.weight)

    def shards(self, name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": self.weight}
