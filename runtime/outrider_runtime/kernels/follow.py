"""A step's tokens, each with the one behind it in its text: engine/follow.py says what for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_runtime.kernels.once import compiled_once
from outrider_runtime.kernels.step import TOKENS, _place_of


def entries(
    texts: Tensor,
    lengths: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    capacities: Tensor,
    query_starts: Tensor,
    owners: Tensor,
    positions: Tensor,
    *,
    nobody: int,
    block_size: int,
    nowhere: int,
) -> tuple[Tensor, ...]:
    """An Entries' fields, in order, for [tokens] owners and positions."""
    tokens, requests = len(owners), len(slots) - 1
    ids, behind, kv_slots = torch.empty(3, tokens, dtype=torch.int32, device=owners.device).unbind(0)
    contexts = torch.empty(requests, dtype=torch.int32, device=owners.device)
    ends, seen = torch.empty(2, min(tokens, requests), dtype=torch.int32, device=owners.device).unbind(0)
    texts_of_ends = torch.empty(len(ends), dtype=torch.int64, device=owners.device)
    _entries[(max(triton.cdiv(tokens, TOKENS), triton.cdiv(requests, TOKENS)),)](
        texts,
        texts.stride(0),
        texts.shape[1] - 1,
        lengths,
        block_tables,
        block_tables.stride(0),
        block_tables.shape[1] - 1,
        slots,
        capacities,
        query_starts,
        owners,
        positions,
        ids,
        behind,
        kv_slots,
        contexts,
        ends,
        seen,
        texts_of_ends,
        tokens,
        requests,
        nobody,
        nowhere,
        BLOCK_SIZE=block_size,
        BLOCK=TOKENS,
    )
    return ids, behind, kv_slots, contexts, ends, seen, texts_of_ends


@compiled_once
def _entries(
    texts: tl.tensor,
    text_stride: tl.tensor,
    last_column: tl.tensor,
    lengths: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    last_block: tl.tensor,
    slots: tl.tensor,
    capacities: tl.tensor,
    query_starts: tl.tensor,
    owners: tl.tensor,
    positions: tl.tensor,
    ids: tl.tensor,
    behind: tl.tensor,
    kv_slots: tl.tensor,
    contexts: tl.tensor,
    ends: tl.tensor,
    seen: tl.tensor,
    texts_of_ends: tl.tensor,
    tokens: tl.tensor,
    requests: tl.tensor,
    nobody: tl.tensor,
    nowhere: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < tokens
    owner = tl.load(owners + token, mask=there, other=0)
    slot = tl.load(slots + owner, mask=there, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=there, other=0) + 1
    length = tl.load(lengths + slot, mask=there, other=1)
    text = tl.load(texts + slot * text_stride + tl.minimum(position, last_column), mask=there, other=0)
    capacity = tl.where(position < length, tl.load(capacities + owner, mask=there, other=0), 0)
    place = _place_of(block_tables, table_stride, last_block, slot, position, capacity, nowhere, there, BLOCK_SIZE)
    tl.store(ids + token, text, mask=there)
    tl.store(behind + token, position, mask=there)
    tl.store(kv_slots + token, place, mask=there)

    request = token
    real = request < requests
    first = tl.load(query_starts + request, mask=real, other=0)
    last = tl.load(query_starts + request + 1, mask=real, other=0)
    has = real & (last > first)
    begin = tl.load(positions + first, mask=has, other=0) + 1
    tl.store(contexts + request, tl.where(has, begin + last - first, 0), mask=real)
    owned = tl.load(slots + request, mask=has, other=0).to(tl.int64)
    reached = tl.load(lengths + owned, mask=has, other=0)
    end = first + reached - 1 - begin
    ending = has & (end >= first) & (end < last)
    counted = real & (request < tokens)
    tl.store(ends + request, tl.where(ending, end, 0), mask=counted)
    tl.store(seen + request, tl.where(ending, reached, 1), mask=counted)
    tl.store(texts_of_ends + request, tl.where(ending, owned, nobody), mask=counted)
