"""SwiGLU's activation (Shazeer, arXiv 2002.05202) of a merged gate and up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def silu_gate(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of the columns times the second: [rows, 2 * size] to [rows, size], by way of float32."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    _silu_gate[(rows, triton.cdiv(size, BLOCK))](gate_up.contiguous(), out, SIZE=size, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _silu_gate(
    gate_up: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
