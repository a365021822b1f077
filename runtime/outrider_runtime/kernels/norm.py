"""Root-mean-square normalisation of many rows, a program each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[rows, size] and [size] to [rows, size], computed in float32."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _rms_norm[(rows,)](
        x.contiguous(),
        weight,
        out,
        SIZE=size,
        EPS=eps,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return out


@triton.jit
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values) / SIZE + EPS) * scale
    tl.store(out + row * SIZE + column, normed.to(out.dtype.element_ty), mask=inside)
