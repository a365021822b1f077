"""Rows of a matrix by their numbers (layers/rows.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_runtime.kernels.once import compiled_once

COLUMNS = 1024  # of a program, at most


def take_rows(source: Tensor, indices: Tensor) -> Tensor:
    """[n, size], dense rows, and [rows] to [rows, size]."""
    rows, size = len(indices), source.shape[1]
    out = torch.empty(rows, size, dtype=source.dtype, device=source.device)
    block = min(COLUMNS, triton.next_power_of_2(size))
    _take_rows[(rows, triton.cdiv(size, block))](
        source, source.stride(0), indices, out, SIZE=size, BLOCK=block, num_warps=max(1, block // 256)
    )
    return out


@compiled_once
def _take_rows(
    source: tl.tensor,
    stride: tl.tensor,
    indices: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    index = tl.load(indices + row).to(tl.int64)
    tl.store(out + row * SIZE + column, tl.load(source + index * stride + column, mask=inside), mask=inside)
