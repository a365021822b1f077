"""Embeddings beside hidden states, both normed: a program for each half of each row (layers/pair.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def pair(
    embeddings: Tensor,
    token_ids: Tensor,
    states: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """[vocab, size], [tokens] and [tokens, size] to [tokens, 2 * size]; norms by their weights, [size] each."""
    tokens, size = states.shape
    out = torch.empty(tokens, 2 * size, dtype=states.dtype, device=states.device)
    block = triton.next_power_of_2(size)
    _pair[(tokens, 2)](
        embeddings,
        len(embeddings) - 1,
        token_ids,
        states.contiguous(),
        *(norms or (None, None)),
        out,
        SIZE=size,
        EPS=eps,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return out


@triton.jit(do_not_specialize=["last"])
def _pair(
    embeddings: tl.tensor,
    last: tl.tensor,
    token_ids: tl.tensor,
    states: tl.tensor,
    embedding_norm: tl.tensor,
    state_norm: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    if half == 0:
        token = tl.minimum(tl.load(token_ids + row), last).to(tl.int64)
        values = tl.load(embeddings + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    else:
        values = tl.load(states + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    if embedding_norm is not None:
        scale = tl.rsqrt(tl.sum(values * values) / SIZE + EPS)
        if half == 0:
            values *= scale * tl.load(embedding_norm + column, mask=inside, other=0.0).to(tl.float32)
        else:
            values *= scale * tl.load(state_norm + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * 2 * SIZE + half * SIZE + column, values.to(out.dtype.element_ty), mask=inside)
