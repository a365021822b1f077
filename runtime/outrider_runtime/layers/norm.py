"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Over the last dimension, of `size`; the mean is taken in float32. On a CUDA device of [rows, size] only."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            from outrider_runtime.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def shards(self, name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": self.weight}
