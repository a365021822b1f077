"""Linear layers that hold several of a checkpoint's matrices as one, so that a step launches one product for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MergedLinear(nn.Module):
    """`outputs` maps the checkpoint's names of the parts, in order, to their output sizes.

    Takes [tokens, in_features], gives [tokens, sum of the sizes].
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.outputs = dict(outputs)
        total = sum(outputs.values())
        self.weight = nn.Parameter(torch.empty(total, in_features, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(total, dtype=dtype, device=device), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def shards(self, name: str) -> dict[str, Tensor]:
        """The part of this layer that each of the checkpoint's tensors fills."""
        sizes = list(self.outputs.values())
        shards = {
            f"{name}.{part}.weight": view
            for part, view in zip(self.outputs, torch.split(self.weight, sizes), strict=True)
        }
        if self.bias is not None:
            shards |= {
                f"{name}.{part}.bias": view
                for part, view in zip(self.outputs, torch.split(self.bias, sizes), strict=True)
            }
        return shards
