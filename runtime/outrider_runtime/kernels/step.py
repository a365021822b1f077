"""The device's part of a step around the models, in a few launches: engine/device_step.py says what each must do.

Indices are small and few, so nothing here is bound by anything but the launch itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_runtime.kernels.once import compiled_once

TOKENS = 128  # of a program of most of these
ALIGNED = 4  # int32 that begin where kernels see it


def update_tables(block_tables: Tensor, slots: Tensor, indices: Tensor, blocks: Tensor) -> None:
    """block_tables[slots, indices] = blocks; [updates] each."""
    _update_tables[(triton.cdiv(len(slots), 256),)](
        block_tables, block_tables.stride(0), slots, indices, blocks, len(slots), BLOCK=256
    )


def gather(
    texts: Tensor,
    lengths: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    starts: Tensor,
    capacities: Tensor,
    written: Tensor,
    query_starts: Tensor,
    owners: Tensor,
    positions: Tensor | None = None,
    *,
    block_size: int,
    nowhere: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A feed's token ids, positions and KV slots, [tokens] int32 each, and its requests' contexts, [requests]. The
    `positions` are written where they are to be, if that is given."""
    tokens, requests = len(owners), len(slots) - 1
    ids, kv_slots = torch.empty(2, tokens, dtype=torch.int32, device=owners.device).unbind(0)
    positions = torch.empty_like(ids) if positions is None else positions
    contexts = torch.empty(requests, dtype=torch.int32, device=owners.device)
    _gather[(max(triton.cdiv(tokens, TOKENS), triton.cdiv(requests, TOKENS)),)](
        texts,
        texts.stride(0),
        texts.shape[1] - 1,
        lengths,
        block_tables,
        block_tables.stride(0),
        block_tables.shape[1] - 1,
        slots,
        starts,
        capacities,
        written,
        query_starts,
        owners,
        ids,
        positions,
        kv_slots,
        contexts,
        tokens,
        requests,
        nowhere,
        BLOCK_SIZE=block_size,
        BLOCK=TOKENS,
    )
    return ids, positions, kv_slots, contexts


def drawing(slots: Tensor, owners: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """For [rows] indices of tokens, which have [tokens] owners and positions: the slots of their texts, and how many
    tokens stand before what is drawn there, [rows] int32 each."""
    count = len(rows)
    own_slots, before = torch.empty(2, count, dtype=torch.int32, device=rows.device).unbind(0)
    _drawing[(triton.cdiv(count, TOKENS),)](slots, owners, rows, positions, own_slots, before, count, BLOCK=TOKENS)
    return own_slots, before


def tails(
    texts: Tensor,
    ends: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    capacities: Tensor,
    drafts: Tensor,
    count: int,
    *,
    block_size: int,
    nowhere: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last `count` tokens of each text, up to `ends` [requests]: ids, positions and KV slots [requests * count];
    and where each text's begin, [requests + 1]. Requests that draft nothing (`drafts`) have their KV nowhere."""
    requests = len(ends)
    ids, positions, kv_slots = torch.empty(3, requests * count, dtype=torch.int32, device=ends.device).unbind(0)
    query_starts = torch.empty(requests + 1, dtype=torch.int32, device=ends.device)
    _tails[(triton.cdiv(requests * count + 1, TOKENS),)](
        texts,
        texts.stride(0),
        texts.shape[1] - 1,
        ends,
        block_tables,
        block_tables.stride(0),
        block_tables.shape[1] - 1,
        slots,
        capacities,
        drafts,
        ids,
        positions,
        kv_slots,
        query_starts,
        requests,
        nowhere,
        COUNT=count,
        BLOCK_SIZE=block_size,
        BLOCK=TOKENS,
    )
    return ids, positions, kv_slots, query_starts


def drafts_ahead(
    lengths: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    capacities: Tensor,
    drafts: Tensor,
    turns: int,
    *,
    block_size: int,
    nowhere: int,
) -> tuple[Tensor, Tensor]:
    """The positions that the texts in `slots` [requests] get drafts at, and the KV slots of these, [turns, requests]
    each. As of tails(), requests that draft nothing have theirs nowhere."""
    requests = len(slots)
    width = triton.cdiv(requests, ALIGNED) * ALIGNED
    positions, kv_slots = torch.empty(2, turns, width, dtype=torch.int32, device=slots.device)[..., :requests].unbind(0)
    _drafts_ahead[(triton.cdiv(requests, TOKENS), turns)](
        lengths,
        block_tables,
        block_tables.stride(0),
        block_tables.shape[1] - 1,
        slots,
        capacities,
        drafts,
        positions,
        kv_slots,
        width,
        requests,
        nowhere,
        BLOCK_SIZE=block_size,
        BLOCK=TOKENS,
    )
    return positions, kv_slots


def place(texts: Tensor, slots: Tensor, first: Tensor, drafts: Tensor) -> None:
    """Write drafts, [rows, k] int32, into the texts in `slots` [rows], from position `first` [rows] on."""
    rows, count = drafts.shape
    _place[(triton.cdiv(rows * count, TOKENS),)](
        texts, texts.stride(0), texts.shape[1] - 1, slots, first, drafts, drafts.stride(0), rows, count, BLOCK=TOKENS
    )


def commit(
    texts: Tensor,
    lengths: Tensor,
    slots: Tensor,
    drafts: Tensor,
    capacities: Tensor,
    first_rows: Tensor,
    sampled: Tensor,
    meant: Tensor,
    results: Tensor,
    stands: Tensor | None,
) -> None:
    """Verification; see speculation/verify.py. Changes texts, lengths and results, [requests, 3 + longest draft]."""
    requests, width = len(results), results.shape[1] - 2
    _commit[(requests,)](
        texts,
        texts.stride(0),
        texts.shape[1] - 1,
        lengths,
        slots,
        drafts,
        capacities,
        first_rows,
        sampled,
        len(sampled),
        meant,
        stands,
        results,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )


def rows_that_count(
    texts: Tensor,
    lengths: Tensor,
    slots: Tensor,
    drafts: Tensor,
    first_rows: Tensor,
    rows: Tensor,
    sampled: Tensor,
    stands: Tensor | None,
    *,
    rest: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the feed's rows the first half of each request's, and those of nobody, so that a step that is measured costs
    what it may cost; or, by what was `sampled` there, the `rest` of those requests whose drafts all stand up to it.

    Which rows they are and what tokens they are sampled behind, [rows] or half as many, int32 each, and how many they
    are, [1]. Behind so many, tokens are 0 and rows undefined.
    """
    most = len(rows) // 2 if rest else len(rows)
    places, tokens = torch.empty(2, most, dtype=torch.int32, device=rows.device).unbind(0)
    count = torch.empty(1, dtype=torch.int32, device=rows.device)
    _rows_that_count[(1,)](
        texts,
        texts.stride(0),
        texts.shape[1] - 1,
        lengths,
        slots,
        drafts,
        first_rows,
        rows,
        sampled,
        stands,
        places,
        tokens,
        count,
        len(slots),
        len(rows),
        most,
        REST=rest,
        REQUESTS=triton.next_power_of_2(len(slots)),
        BLOCK=1024,
        num_warps=8,
    )
    return places, tokens, count


def stands_by_lot(lengths: Tensor, slots: Tensor, lots: Tensor) -> Tensor:
    """lots[slots, lengths[slots] modulo their number], which is a power of two: [requests] int32."""
    requests = len(slots)
    stands = torch.empty(requests, dtype=torch.int32, device=slots.device)
    _stands_by_lot[(triton.cdiv(requests, TOKENS),)](
        lengths, slots, lots, stands, requests, LOTS=lots.shape[1], BLOCK=TOKENS
    )
    return stands


@compiled_once
def _update_tables(
    block_tables: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    indices: tl.tensor,
    blocks: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    update = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = update < count
    slot = tl.load(slots + update, mask=there, other=0).to(tl.int64)
    index = tl.load(indices + update, mask=there, other=0)
    tl.store(block_tables + slot * stride + index, tl.load(blocks + update, mask=there, other=0), mask=there)


@triton.jit
def _place_of(
    block_tables: tl.tensor,
    stride: tl.tensor,
    last_block: tl.tensor,
    slot: tl.tensor,
    position: tl.tensor,
    capacity: tl.tensor,
    nowhere: tl.tensor,
    there: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """The KV slot of a position."""
    index = tl.minimum(tl.maximum(position, 0) // BLOCK_SIZE, last_block)
    block = tl.load(block_tables + slot * stride + index, mask=there, other=0)
    inside = (position >= 0) & (position < capacity)
    return tl.where(inside, block * BLOCK_SIZE + tl.maximum(position, 0) % BLOCK_SIZE, nowhere)


@compiled_once
def _gather(
    texts: tl.tensor,
    text_stride: tl.tensor,
    last_column: tl.tensor,
    lengths: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    last_block: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    capacities: tl.tensor,
    written: tl.tensor,
    query_starts: tl.tensor,
    owners: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    contexts: tl.tensor,
    tokens: tl.tensor,
    requests: tl.tensor,
    nowhere: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < tokens
    owner = tl.load(owners + token, mask=there, other=0)
    slot = tl.load(slots + owner, mask=there, other=0).to(tl.int64)
    start = tl.load(starts + owner, mask=there, other=0)
    start = tl.where(start < 0, tl.load(lengths + slot, mask=there, other=1) - 1, start)
    position = start + token - tl.load(query_starts + owner, mask=there, other=0)
    text = tl.load(texts + slot * text_stride + tl.minimum(position, last_column), mask=there, other=0)
    capacity = tl.load(capacities + owner, mask=there, other=0)
    capacity = tl.where(position < tl.load(written + owner, mask=there, other=0), 0, capacity)
    place = _place_of(block_tables, table_stride, last_block, slot, position, capacity, nowhere, there, BLOCK_SIZE)
    tl.store(ids + token, text, mask=there)
    tl.store(positions + token, position, mask=there)
    tl.store(kv_slots + token, place, mask=there)

    request = token
    real = request < requests
    own = tl.load(slots + request, mask=real, other=0)
    begin = tl.load(starts + request, mask=real, other=0)
    begin = tl.where(begin < 0, tl.load(lengths + own, mask=real, other=1) - 1, begin)
    queries = tl.load(query_starts + request + 1, mask=real, other=0) - tl.load(
        query_starts + request, mask=real, other=0
    )
    tl.store(contexts + request, begin + queries, mask=real)


@compiled_once
def _drawing(
    slots: tl.tensor,
    owners: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    own_slots: tl.tensor,
    before: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < count
    token = tl.load(rows + row, mask=there, other=0)
    owner = tl.load(owners + token, mask=there, other=0)
    tl.store(own_slots + row, tl.load(slots + owner, mask=there, other=0), mask=there)
    tl.store(before + row, tl.load(positions + token, mask=there, other=0) + 1, mask=there)


@compiled_once
def _tails(
    texts: tl.tensor,
    text_stride: tl.tensor,
    last_column: tl.tensor,
    ends: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    last_block: tl.tensor,
    slots: tl.tensor,
    capacities: tl.tensor,
    drafts: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    query_starts: tl.tensor,
    requests: tl.tensor,
    nowhere: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = token // COUNT
    there = request < requests
    slot = tl.load(slots + request, mask=there, other=0).to(tl.int64)
    position = tl.load(ends + request, mask=there, other=1) - COUNT + token % COUNT  # -1 in a text of a single token
    column = tl.minimum(tl.maximum(position, 0), last_column)
    text = tl.load(texts + slot * text_stride + column, mask=there, other=0)
    capacity = _drafted_capacity(capacities, drafts, request, there)
    place = _place_of(block_tables, table_stride, last_block, slot, position, capacity, nowhere, there, BLOCK_SIZE)
    tl.store(ids + token, text, mask=there)
    tl.store(positions + token, position, mask=there)
    tl.store(kv_slots + token, place, mask=there)
    tl.store(query_starts + request, token, mask=(request <= requests) & (token % COUNT == 0))


@compiled_once
def _drafts_ahead(
    lengths: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    last_block: tl.tensor,
    slots: tl.tensor,
    capacities: tl.tensor,
    drafts: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    width: tl.tensor,
    requests: tl.tensor,
    nowhere: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request, turn = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    there = request < requests
    slot = tl.load(slots + request, mask=there, other=0).to(tl.int64)
    position = tl.load(lengths + slot, mask=there, other=1) + turn
    capacity = _drafted_capacity(capacities, drafts, request, there)
    place = _place_of(block_tables, table_stride, last_block, slot, position, capacity, nowhere, there, BLOCK_SIZE)
    tl.store(positions + turn * width + request, position, mask=there)
    tl.store(kv_slots + turn * width + request, place, mask=there)


@triton.jit
def _drafted_capacity(capacities: tl.tensor, drafts: tl.tensor, request: tl.tensor, there: tl.tensor) -> tl.tensor:
    drafted = tl.load(drafts + request, mask=there, other=0) > 0
    return tl.where(drafted, tl.load(capacities + request, mask=there, other=0), 0)


@compiled_once
def _place(
    texts: tl.tensor,
    stride: tl.tensor,
    last_column: tl.tensor,
    slots: tl.tensor,
    first: tl.tensor,
    drafts: tl.tensor,
    draft_stride: tl.tensor,
    rows: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, turn = index // count, index % count
    there = row < rows
    slot = tl.load(slots + row, mask=there, other=0).to(tl.int64)
    column = tl.minimum(tl.load(first + row, mask=there, other=0) + turn, last_column)
    draft = tl.load(drafts + row * draft_stride + turn, mask=there, other=0)
    tl.store(texts + slot * stride + column, draft, mask=there)


@compiled_once
def _rows_that_count(
    texts: tl.tensor,
    stride: tl.tensor,
    last_column: tl.tensor,
    lengths: tl.tensor,
    slots: tl.tensor,
    drafts: tl.tensor,
    first_rows: tl.tensor,
    rows: tl.tensor,
    sampled: tl.tensor,
    stands: tl.tensor,
    places: tl.tensor,
    behind: tl.tensor,
    found: tl.tensor,
    requests: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
    REST: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`behind`: the tokens."""
    request, lane = tl.arange(0, REQUESTS), tl.arange(0, BLOCK)
    there = request < requests
    first = tl.load(first_rows + request, mask=there, other=-1)
    own = tl.where(first < 0, 0, 1 + tl.load(drafts + request, mask=there, other=0))
    half = (own + 1) // 2
    begin, taken = tl.zeros([REQUESTS], tl.int32), half
    if REST:
        if stands is None:
            slot = tl.load(slots + request, mask=there, other=0).to(tl.int64)
            length = tl.load(lengths + slot, mask=there, other=0)
            going = own > 0
            for turn in range(tl.max(half)):
                looked = going & (turn < half)
                column = tl.minimum(length + turn, last_column)
                draft = tl.load(texts + slot * stride + column, mask=looked, other=0)
                going &= draft == tl.load(sampled + first + turn, mask=looked, other=0)
        else:
            going = tl.load(stands + request, mask=there, other=0) >= half
        begin, taken = half, tl.where(going, own - half, 0)
    at = tl.cumsum(taken) - taken
    for turn in range(tl.max(taken)):
        row, inside = first + begin + turn, turn < taken
        tl.store(places + at + turn, row, mask=inside)
        tl.store(behind + at + turn, tl.load(rows + row, mask=inside, other=0), mask=inside)
    picked = tl.sum(taken)
    if not REST:
        last = tl.sum(own)
        for row in range(last, count, BLOCK):
            tl.store(places + picked + row - last + lane, row + lane, mask=row + lane < count)
        picked += count - last
    tl.store(found, picked)
    for unused in range(tl.sum(taken), most, BLOCK):
        tl.store(behind + unused + lane, tl.zeros([BLOCK], tl.int32), mask=unused + lane < most)


@compiled_once
def _stands_by_lot(
    lengths: tl.tensor,
    slots: tl.tensor,
    lots: tl.tensor,
    stands: tl.tensor,
    requests: tl.tensor,
    LOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = request < requests
    slot = tl.load(slots + request, mask=there, other=0)
    length = tl.load(lengths + slot, mask=there, other=0)
    tl.store(stands + request, tl.load(lots + slot * LOTS + (length & (LOTS - 1)), mask=there, other=0), mask=there)


@compiled_once
def _commit(
    texts: tl.tensor,
    stride: tl.tensor,
    last_column: tl.tensor,
    lengths: tl.tensor,
    slots: tl.tensor,
    drafts: tl.tensor,
    capacities: tl.tensor,
    first_rows: tl.tensor,
    sampled: tl.tensor,
    rows: tl.tensor,
    meant: tl.tensor,
    stands: tl.tensor,
    results: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    first = tl.load(first_rows + request)
    drafted = tl.load(drafts + request)
    length = tl.load(lengths + slot)
    turn = tl.arange(0, BLOCK)
    there = turn < WIDTH
    row = tl.minimum(tl.maximum(first, 0) + turn, rows - 1)
    target = tl.load(sampled + row, mask=there, other=-1).to(tl.int32)
    column = tl.minimum(length + turn, last_column)
    draft = tl.load(texts + slot * stride + column, mask=there, other=-1)
    if stands is None:
        # the first draft that differs, or the first place without one
        differs = (draft != target) | (turn >= drafted)
        accepted = tl.min(tl.where(differs, turn, BLOCK))
    else:
        accepted = tl.load(stands + request).to(tl.int32)
    accepted = tl.minimum(tl.minimum(accepted, drafted), tl.maximum(tl.load(capacities + request) - length, 0))
    emitted = tl.where(first < 0, 0, accepted + 1)
    tl.debug_barrier()  # all drafts are read before the first is written over
    tl.store(texts + slot * stride + column, target, mask=turn < emitted)
    tl.store(lengths + slot, tl.minimum(length + emitted, last_column))  # nobody's stays
    line = results + request * (WIDTH + 2)
    tl.store(line, emitted)
    tl.store(line + 1, tl.load(meant + request))
    tl.store(line + 2 + turn, target, mask=there)
