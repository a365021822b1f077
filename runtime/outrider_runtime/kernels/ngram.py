"""N-gram drafts from the texts on the device, as speculation/ngram.py defines them: a program for each text."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # tokens of a text that are looked at together


def continuations(
    texts: Tensor, slots: Tensor, lengths: Tensor, count: int, shortest: int, longest: int
) -> tuple[Tensor, Tensor]:
    """`count` tokens that may follow each text, [rows, count] int32, and whether there was a match, [rows] bool.

    `texts` is [slots, width] int32; `slots` and `lengths` [rows] say which are meant, and how much of them counts.
    Without a match the drafts are the text's first tokens, so still tokens. The best match is the longest, up to
    `longest` tokens, then the latest; a continuation that reaches the text's end goes on with itself.
    """
    drafts = torch.empty(len(slots), count, dtype=torch.int32, device=texts.device)
    found = torch.empty(len(slots), dtype=torch.bool, device=texts.device)
    block = min(BLOCK, triton.next_power_of_2(texts.shape[1]))
    _continuations[(len(slots),)](
        texts,
        texts.stride(0),
        slots,
        lengths,
        drafts,
        found,
        SHORTEST=shortest,
        LONGEST=longest,
        COUNT=count,
        COUNT_BLOCK=triton.next_power_of_2(count),
        BLOCK=block,
        num_warps=8,
    )
    return drafts, found


@triton.jit
def _continuations(
    texts: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    drafts: tl.tensor,
    found: tl.tensor,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    length = tl.load(lengths + row).to(tl.int32)
    text = texts + slot.to(tl.int64) * stride
    start = 0  # of the continuation
    matched = 0
    stop = length  # continuations that start before it are still to be looked at
    while (stop > 1) & (matched < LONGEST):  # the latest of the longest wins, so from the end
        end = stop - BLOCK + tl.arange(0, BLOCK)  # a match ends before the token at `end`, which follows it
        alive = (end >= 1) & (end < stop)
        size = tl.zeros((BLOCK,), tl.int32)
        for back in tl.static_range(LONGEST):
            suffix = tl.load(text + tl.maximum(length - 1 - back, 0))
            alive &= tl.load(text + end - 1 - back, mask=alive & (end > back), other=-1) == suffix
            size += alive.to(tl.int32)
        best = tl.max(size)
        if (best >= SHORTEST) & (best > matched):
            matched = best
            start = tl.max(tl.where(size == best, end, 0))
        stop = stop - BLOCK
    index = tl.arange(0, COUNT_BLOCK)
    period = tl.maximum(length - start, 1)
    draft = tl.load(text + start + index % period, mask=index < COUNT, other=0)
    tl.store(drafts + row * COUNT + index, draft, mask=index < COUNT)
    tl.store(found + row, start > 0)
