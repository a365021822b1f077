"""Attention over the paged KV cache in one kernel: decode, verification and prefill alike.

A persistent grid walks a list of work items, made on the device once a step. An item is a tile of one request's
queries against a part of its context, for one KV head; the query heads that share it are more rows of the tile.

Few queries are a matter of reading the KV, so each program is to read as much of it as any other, whatever the lengths
of the texts: their tiles lie one behind the other on an axis of keys, which is cut into a slot for each program of a KV
head. A tile that lies in several slots is computed in as many parts, combined by the program that ends last. (Stream-K,
Osama et al. 2023, as in LeanAttention, Sanovar et al. 2024, but that texts alike are not cut where it gains nothing.)
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_runtime.kernels.compiling import kept_zeros
from outrider_runtime.kernels.limits import padded, processors, shared_memory
from outrider_runtime.layers.attention import AttentionShape, PagedPlan, Tile, Tuning, WorkList

MAX_COUNTERS = tl.constexpr(1 << 14)  # of a launch: two for each program, of which no GPU has so many
LONE = 8  # tokens of a batch that leaves most processors without work: what counts is how soon a part is done
WIDE = 192  # of one that keeps them busy with more and smaller tiles
SPLIT_TOKENS = 512  # of a context, the fewest of a part
LONE_SPLIT_TOKENS = 32
FEW_SPLIT_TOKENS = 64  # of a few requests, a token each
MAX_SPLITS = 16  # the most parts of a context
LONE_AT_ONCE, AT_ONCE = 16, 4  # parts that are combined at once, powers of two
CUT_TOKENS = tl.constexpr(128)  # to be cut and combined costs a tile about as much as so many of its tokens
LOG2_E = tl.constexpr(1.4426950408889634)
MOST_OWN = tl.constexpr(64)  # tokens of a tree: a bit each
FIELDS = 10  # of a work item, each a row of WorkList.items
ROW, QUERIES, POSITION, BEGIN, END, TABLE, STEP, NEXT, PARTS, FIRST = (tl.constexpr(field) for field in range(FIELDS))


def tuning_for(dtype: torch.dtype, dim: int, tokens: int, *, mixed: bool = False, single: bool = False) -> Tuning:
    """For a batch of `tokens`, `mixed` with prompts or not, or a `single` one a request. Measured on an H200 by
    benchmarks/kernels_attention.py.

    64 rows are the fewest that Hopper's asynchronous tensor-core instructions take. The narrow tile uses the older
    ones, and has room for twice as many programs a processor to wait for memory. Each part of a context costs about
    5 us of filling its pipeline and being combined, which is hidden where programs wait for memory in turn, but not in
    a batch of a few tokens. float32 is for tests: no tensor cores, so small tiles.
    """
    if dtype is torch.float32:
        tile = Tile(rows=16, keys=32, stages=2, warps=4, per_processor=2)
        return Tuning(narrow=tile, small=tile, large=tile, small_queries=32, split_tokens=128, max_splits=16)
    if dim > 128:
        narrow = Tile(rows=16, keys=32, stages=2, warps=4, per_processor=2)
        small = Tile(rows=64, keys=32, stages=2, warps=4, per_processor=2)
        large = Tile(rows=128, keys=32, stages=3, warps=8, per_processor=1)
    else:
        narrow = Tile(rows=16, keys=32, stages=3, warps=4, per_processor=4)
        if dim <= 64:
            narrow = Tile(rows=16, keys=64, stages=3, warps=2, per_processor=4)
        small = Tile(rows=64, keys=64, stages=3, warps=4, per_processor=2)
        if tokens <= LONE:
            narrow = small = replace(narrow, per_processor=2)
            if dim <= 64:
                narrow = small = Tile(rows=64, keys=32, stages=2, warps=4, per_processor=2)
        elif tokens >= WIDE and not mixed:
            small = Tile(rows=32, keys=32, stages=3, warps=2, per_processor=4)
        large = Tile(rows=128, keys=64, stages=3, warps=8, per_processor=1)
    split_tokens = LONE_SPLIT_TOKENS if tokens <= LONE else SPLIT_TOKENS
    if single and 1 < tokens <= LONE and dim <= 128:
        split_tokens = FEW_SPLIT_TOKENS
    return Tuning(narrow, small, large, small_queries=64, split_tokens=split_tokens, max_splits=MAX_SPLITS)


def plan_paged(
    query_starts: Tensor,
    context_lengths: Tensor,
    table_rows: Tensor,
    block_tables: Tensor,
    *,
    tokens: int,
    block_size: int,
    shape: AttentionShape,
    dim: int,
    small: bool,
    narrow: bool = False,
    ancestors: Tensor | None = None,
    before: int = 0,
    tuning: Tuning | None = None,
) -> PagedPlan:
    """Once a step and model: who attends to what, in work items for all layers. Does not synchronise.

    For n requests, int32 all: query_starts [n + 1] are their first rows in the batch of `tokens` rows, those behind the
    last being padding, as are requests without rows; context_lengths [n] are what their last queries see, themselves
    included; table_rows [n] are their rows of block_tables [slots, blocks]. `small`: only the tile for few queries a
    request is used, as befits steps that have no larger ones; `narrow`: the one for a query or two. `ancestors`
    [tokens] int64: bit j tells whether a query sees the j-th of its request's own tokens in this step (at most 64), in
    place of all up to itself; -1 leaves it at these. The tokens of a tree count from the one `before` the step's first,
    and a window counts a query's ancestors, all of which it must hold.
    """
    small = small or narrow
    tuning = tuning or tuning_for(shape.dtype, dim, tokens, mixed=not small, single=narrow)
    lists = []
    bounds = [(tuning.narrow if narrow else tuning.small, 0, tokens if small else tuning.small_queries)]
    if not small:
        bounds.append((tuning.large, tuning.small_queries, tokens))
    for tile, above, most in bounds:
        lists += _work_lists(
            query_starts,
            context_lengths.unsqueeze(0),
            table_rows,
            block_tables,
            tokens=tokens,
            block_size=block_size,
            shape=shape,
            dim=dim,
            tuning=tuning,
            tile=tile,
            above=above,
            most=most,
            tree=ancestors is not None,
            before=before,
        )
    return PagedPlan(tuple(lists), tokens, block_tables, block_size, shape, ancestors)


def plan_decodes(
    query_starts: Tensor,
    context_lengths: Tensor,
    table_rows: Tensor,
    block_tables: Tensor,
    *,
    block_size: int,
    shape: AttentionShape,
    dim: int,
) -> list[PagedPlan]:
    """plan_paged() for steps of one query a request, by [steps, requests] contexts, in one launch."""
    requests = len(table_rows)
    tuning = tuning_for(shape.dtype, dim, requests, single=True)
    lists = _work_lists(
        query_starts,
        context_lengths,
        table_rows,
        block_tables,
        tokens=requests,
        block_size=block_size,
        shape=shape,
        dim=dim,
        tuning=tuning,
        tile=tuning.narrow,
        above=0,
        most=requests,
        tree=False,
        before=0,
    )
    return [PagedPlan((work,), requests, block_tables, block_size, shape, None) for work in lists]


def _work_lists(
    query_starts: Tensor,
    context_lengths: Tensor,
    table_rows: Tensor,
    block_tables: Tensor,
    *,
    tokens: int,
    block_size: int,
    shape: AttentionShape,
    dim: int,
    tuning: Tuning,
    tile: Tile,
    above: int,
    most: int,
    tree: bool,
    before: int,
) -> list[WorkList]:
    """Of plan_paged()'s requests those with more than `above` queries and at most `most`, for each of the steps that
    `context_lengths` [steps, requests] are of."""
    steps, requests = context_lengths.shape
    longest = block_tables.shape[1] * block_size
    tile = tile.within(shared_memory(query_starts.device), padded(dim), shape.dtype.itemsize)
    queries, small = tile.queries(shape.shared), above == 0
    # Requests without rows are none, the padding is one more, and each ends in one tile that is not full.
    tiles = min(requests + 1, triton.cdiv(tokens, above + 1)) + tokens // queries
    slots = 0
    if small:
        programs = processors(query_starts.device) * tile.per_processor
        slots = min(max(1, programs // shape.kv_heads), tiles * tuning.max_splits)
    items = torch.empty(steps, FIELDS, slots + tiles, dtype=torch.int32, device=query_starts.device)
    _list_work[(requests + 1, steps)](
        query_starts,
        context_lengths,
        context_lengths.stride(0),
        table_rows,
        items,
        items.stride(0),
        requests,
        tokens,
        above,
        most,
        slots,
        slots + tiles,
        block_tables.stride(0),
        longest,
        before,
        SMALL=small,
        TILE_QUERIES=queries,
        WINDOW=shape.sliding_window or 0,
        TREE=tree,
        FIRST_POSITION=shape.first,
        KEYS=tile.keys,
        SPLIT_TOKENS=tuning.split_tokens,
        MAX_SPLITS=tuning.max_splits,
        REQUESTS=triton.next_power_of_2(requests + 1),
        CHUNK=64,
        num_warps=4,
    )
    return [WorkList(each, slots, tuning.max_splits, tile) for each in items]


def paged_attention(query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, scale: float) -> Tensor:
    """query [tokens, heads, dim], its last two dimensions contiguous; keys and values [cache slots, kv heads, dim].

    Returns [tokens, heads, dim], zeros where nothing is seen, as in padding.
    """
    tokens, heads, dim = query.shape
    kv_heads, shared = plan.shape.kv_heads, plan.shape.shared
    if (tokens, heads, keys.shape[1]) != (plan.tokens, kv_heads * shared, kv_heads):
        raise ValueError(
            f"query is [{tokens}, {heads}, {dim}], of {keys.shape[1]} KV heads; the plan is for {plan.tokens} tokens, "
            f"and {shared} heads for each of {kv_heads} KV heads"
        )
    if query.stride()[1:] != (dim, 1) or not keys.is_contiguous() or not values.is_contiguous():
        raise ValueError("keys, values and each token's query must be contiguous")
    out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
    for work in plan.lists:
        tile, capacity = work.tile, work.items.shape[1]
        rows = tile.padded_rows(shared)
        parts = torch.empty(2 * work.slots, kv_heads, rows, dim, dtype=torch.float32, device=query.device)
        weights = torch.empty(2 * work.slots, kv_heads, rows, dtype=torch.float32, device=query.device)
        grid = work.slots * kv_heads
        if not work.slots:
            grid = min(capacity * kv_heads, processors(query.device) * tile.per_processor)
        _attention[(grid,)](
            query,
            keys,
            values,
            out,
            parts,
            weights,
            _counters(query.device),
            work.items,
            plan.block_tables,
            plan.ancestors,
            query.stride(0),
            capacity,
            scale * LOG2_E.value,
            KV_HEADS=kv_heads,
            SHARED=shared,
            DIM=dim,
            DIM_PADDED=padded(dim),
            PIECE=tile.piece(padded(dim)),
            BLOCK_SIZE=plan.block_size,
            WINDOW=plan.shape.sliding_window or 0,
            SOFTCAP=plan.shape.softcap or 0.0,
            SMALL=work.slots > 0,
            ROWS=rows,
            KEYS=tile.keys,
            MAX_SPLITS=work.splits,
            AT_ONCE=LONE_AT_ONCE if plan.tokens <= LONE else AT_ONCE,
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=tile.registers,
        )
    return out


@cache
def _counters(device: torch.device) -> Tensor:
    """How many parts of a tile are done, by its first part and KV head; then how many items were taken, and how many
    programs have ended. The last program to add to one sets it back to zero."""
    return kept_zeros(MAX_COUNTERS.value + 2, device)


# Values of every kind come by, and a compilation each would gain nothing.
@triton.jit(
    do_not_specialize=[
        "context_stride", "item_stride", "requests", "tokens", "above", "most", "slots", "capacity", "table_stride",
        "longest", "before",
    ],
    do_not_specialize_on_alignment=["query_starts", "context_lengths"],
)  # fmt: skip
def _list_work(
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    context_stride: tl.tensor,
    table_rows: tl.tensor,
    items: tl.tensor,
    item_stride: tl.tensor,
    requests: tl.tensor,
    tokens: tl.tensor,
    above: tl.tensor,
    most: tl.tensor,
    slots: tl.tensor,
    capacity: tl.tensor,
    table_stride: tl.tensor,
    longest: tl.tensor,
    before: tl.tensor,
    SMALL: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    FIRST_POSITION: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """A program per request and step writes its items, if it has more than `above` queries and at most `most`. The last
    request is the padding, without a context. Lengths are in KEYS.

    Where SMALL, the items that begin with a slot are the first `slots` ones, in order; the others, each the first part
    of its tile, lie behind them in the order of the tiles, and each item names the NEXT one of its slot. A slot has two
    parts of tiles at most, the item that begins with it and its last one: their numbers are twice the slot's, and one
    more. Else there is an item for each tile, in that order.
    """
    request = tl.program_id(0)
    context_lengths += tl.program_id(1) * context_stride
    items += tl.program_id(1) * item_stride
    every = tl.arange(0, REQUESTS)
    first_rows = tl.load(query_starts + every, mask=every <= requests, other=0)
    behind = tl.load(query_starts + every + 1, mask=every < requests, other=tokens)
    queries = tl.where(every <= requests, behind - first_rows, 0)
    contexts = tl.load(context_lengths + every, mask=every < requests, other=0).to(tl.int32)
    tiles = tl.where((queries > above) & (queries <= most), tl.cdiv(queries, TILE_QUERIES), 0)

    own = every == request
    own_tiles = tl.sum(tl.where(own, tiles, 0))
    own_row = tl.sum(tl.where(own, first_rows, 0))
    own_queries = tl.sum(tl.where(own, queries, 0))
    step = tl.sum(tl.where(own, contexts, 0)) - own_queries
    table = tl.load(table_rows + request, mask=request < requests, other=0) * table_stride
    tile_base = tl.sum(tl.where(every < request, tiles, 0))
    all_tiles = tl.sum(tiles)

    used, limit = all_tiles, capacity  # of the places where programs look for an item
    most_parts = 1
    if SMALL:
        span = contexts  # the keys that a tile sees at most
        if WINDOW > 0:
            span = tl.minimum(span, WINDOW + TILE_QUERIES + KEYS + (MOST_OWN + before if TREE else 0))
        length = tl.maximum(tl.cdiv(span, KEYS), 1)
        real = every < requests
        size, unit, used = _slots(tiles, length, real, slots, tl.cdiv(SPLIT_TOKENS, KEYS), MAX_SPLITS, KEYS)
        limit = slots
        taken = tl.where(real, tl.cdiv(length, unit) * unit, 1)  # of the axis
        axis_base = tl.sum(tl.where(every < request, tiles * taken, 0))
        own_length = tl.sum(tl.where(own, length, 0))
        own_taken = tl.sum(tl.where(own, taken, 0))
        most_parts = tl.cdiv(own_length, size) + 1

    lane = tl.arange(0, CHUNK)
    for offset in range(0, own_tiles * most_parts, CHUNK):
        number = (offset + lane) // most_parts
        inside = number < own_tiles
        tile = own_tiles - 1 - number  # the longest first
        number += tile_base
        first = tile * TILE_QUERIES
        count = tl.minimum(own_queries - first, TILE_QUERIES)
        begin = tl.zeros([CHUNK], tl.int32)
        if WINDOW > 0:
            earliest = step + first
            if TREE:  # a token of a tree is at most as deep as it is far behind
                earliest = step - before + tl.maximum(first - MOST_OWN, 0)
            begin = tl.maximum(earliest - WINDOW + 1, 0) // KEYS * KEYS
        end = tl.minimum(step + first + count, longest)
        target = items + number
        if SMALL:
            place = axis_base + (number - tile_base) * own_taken
            first_slot, last_slot = place // size, (place + own_length - 1) // size
            slot = first_slot + (offset + lane) % most_parts
            inside = inside & (slot <= last_slot)
            end = tl.minimum(end, begin + tl.maximum((slot + 1) * size - place, 0) * KEYS)
            begin += tl.maximum(slot * size - place, 0) * KEYS
            target = items + tl.where(slot * size >= place, slot, slots + number)
            # The next tile of the slot, if this one does not fill it.
            alone = (slot < last_slot) | (place + own_taken >= (slot + 1) * size) | (number == all_tiles - 1)
            tl.store(target + NEXT * capacity, tl.where(alone, capacity, slots + number + 1), mask=inside)
            tl.store(target + PARTS * capacity, last_slot - first_slot + 1, mask=inside)
            tl.store(target + FIRST * capacity, 2 * first_slot + (first_slot * size < place), mask=inside)
        begin = tl.maximum(begin, FIRST_POSITION)
        tl.store(target + ROW * capacity, own_row + first, mask=inside)
        tl.store(target + QUERIES * capacity, count, mask=inside)
        tl.store(target + POSITION * capacity, step + first, mask=inside)
        tl.store(target + BEGIN * capacity, begin, mask=inside)
        tl.store(target + END * capacity, end, mask=inside)
        tl.store(target + TABLE * capacity, table + tl.zeros([CHUNK], tl.int32), mask=inside)
        tl.store(target + STEP * capacity, step - before + tl.zeros([CHUNK], tl.int32), mask=inside)
    for offset in range(used + request * CHUNK, limit, (requests + 1) * CHUNK):
        unused = offset + lane
        tl.store(items + QUERIES * capacity + unused, tl.zeros([CHUNK], tl.int32), mask=unused < limit)


@triton.jit
def _slots(
    tiles: tl.tensor,
    length: tl.tensor,
    real: tl.tensor,
    slots: tl.tensor,
    LEAST: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How long each slot is, of what unit each tile takes a multiple, so that tiles that are alike are cut where it
    helps and nowhere else, and how many slots are used. Tiles that are not `real` are padding, and each as long as
    one."""
    count = tl.maximum(tl.sum(tl.where(real, tiles, 0)), 1)
    whole = tl.sum(tl.where(real, tiles * length, 0))
    padding = tl.sum(tl.where(real, 0, tiles))
    longest = tl.maximum(tl.max(tl.where(real & (tiles > 0), length, 0)), 1)
    # A tile that begins in the middle of a slot lies in one more of them.
    least = tl.maximum(tl.cdiv(longest, max(1, MAX_SPLITS - 1)), tl.minimum(LEAST, longest))
    # To the same for each slot, wherever that cuts.
    even = tl.maximum(tl.cdiv(whole + padding, slots), least)
    # Or so that tiles begin with a slot: in as many parts each as there are slots for it, or of a size that leaves all
    # enough of them. Or whole, and as many to each slot.
    each = (slots - tl.where(padding > 0, 1, 0)) // count
    if each > 0:
        unit = tl.cdiv(longest, tl.minimum(tl.minimum(each, MAX_SPLITS), tl.cdiv(longest, LEAST)))
        spare = slots - count - 1
        if spare > 0:
            unit = tl.minimum(unit, tl.maximum(tl.cdiv(whole, spare), least))
        size = unit
    else:
        unit = longest
        size = tl.cdiv(count, slots) * longest
    filled = tl.sum(tl.where(real, tiles * tl.cdiv(length, unit) * unit, tiles))
    fits = (tl.cdiv(filled, size) <= slots) & (size * 16 <= even * 17 + tl.cdiv(CUT_TOKENS, KEYS) * 16)
    if not fits:
        size, unit, filled = even, 1, whole + padding
    return size, unit, tl.cdiv(filled, size)


@triton.jit(do_not_specialize=["capacity"])
def _attention(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    counters: tl.tensor,
    items: tl.tensor,
    block_tables: tl.tensor,
    ancestors: tl.tensor,
    query_stride: tl.tensor,
    capacity: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMALL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """`scale` is in units of log2, for exp2."""
    HEADS: tl.constexpr = KV_HEADS * SHARED
    row = tl.arange(0, ROWS)
    column = tl.arange(0, DIM_PADDED)
    # A slot's items for a KV head. Or, of prompts' tiles, the first two of each program are its own, then whoever is
    # ready takes the next one: in a fixed order programs that begin with the longest are the last by a tenth or more.
    programs = tl.num_programs(0)
    upcoming = tl.program_id(0) + programs
    taken = counters + MAX_COUNTERS
    slot = tl.program_id(0) // KV_HEADS
    number, kv_head = slot, tl.program_id(0) % KV_HEADS
    queries, first_row, position, begin, end, table_row, step, behind, count, first = _item(items, capacity, number)
    blocks = _blocks(block_tables + table_row, begin // KEYS * KEYS, end, BLOCK_SIZE, KEYS)
    while queries > 0:
        table = block_tables + table_row
        # Known before it is needed, so that no item begins with waiting for what it is about.
        if SMALL:
            next_number, next_head = behind, kv_head
        else:
            next_number, next_head = upcoming // KV_HEADS, upcoming % KV_HEADS
            upcoming = 2 * programs + tl.atomic_add(taken, 1, sem="relaxed")
        following = _item(items, capacity, next_number)
        _, _, _, next_begin, next_end, next_row, _, _, _, _ = following
        next_table, next_begin = block_tables + next_row, next_begin // KEYS * KEYS

        live = row < queries * SHARED
        token, head = row // SHARED, kv_head * SHARED + row % SHARED
        source = query + first_row.to(tl.int64) * query_stride
        filled = live[:, None] & (column < DIM)[None, :]
        tile = tl.load(source + (token * query_stride + head * DIM)[:, None] + column[None, :], mask=filled, other=0.0)
        positions = position + token
        seen = tl.zeros([ROWS], tl.int64)
        if ancestors is not None:
            seen = tl.load(ancestors + first_row + token, mask=live, other=0)

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc: tl.tuple = ()  # [rows, piece] each
        for _ in tl.static_range(DIM_PADDED // PIECE):
            acc += (tl.zeros([ROWS, PIECE], tl.float32),)
        start = begin // KEYS * KEYS
        masked_from = start
        if not SMALL and WINDOW == 0:
            if begin == start:  # all queries of the tile see what lies before the first one
                open_end = position + 1 if ancestors is None else step
                masked_from = tl.maximum(start, tl.minimum(open_end, end) // KEYS * KEYS)
            top, total, acc, blocks = _visit(
                top, total, acc, blocks, tile, positions, seen, keys, values, table, kv_head, begin, start, masked_from,
                end, table, masked_from, end, step, scale, ancestors is not None, False,
                KV_HEADS, DIM, DIM_PADDED, PIECE, BLOCK_SIZE, WINDOW, SOFTCAP, KEYS,
            )  # fmt: skip
        top, total, acc, blocks = _visit(
            top, total, acc, blocks, tile, positions, seen, keys, values, table, kv_head, begin, masked_from, end, end,
            next_table, next_begin, next_end, step, scale, ancestors is not None, True,
            KV_HEADS, DIM, DIM_PADDED, PIECE, BLOCK_SIZE, WINDOW, SOFTCAP, KEYS,
        )  # fmt: skip
        if masked_from >= end:  # nothing was visited, so nobody looked ahead
            blocks = _blocks(next_table, next_begin, next_end, BLOCK_SIZE, KEYS)

        divisor = tl.where(total > 0, total, 1.0)  # a row that sees nothing is zeros
        factor = 1 / divisor
        alone = not SMALL or count == 1
        own = 2 * slot + tl.where(number == slot, 0, 1)
        part = (own.to(tl.int64) * KV_HEADS + kv_head) * ROWS + row
        for piece in tl.static_range(DIM_PADDED // PIECE):
            at = piece * PIECE + tl.arange(0, PIECE)
            stored = live[:, None] & (at < DIM)[None, :]
            result = acc[piece] * factor[:, None]
            if alone:
                target = out + first_row.to(tl.int64) * (HEADS * DIM)
                place = (token * HEADS + head) * DIM
                tl.store(target + place[:, None] + at[None, :], result.to(out.dtype.element_ty), mask=stored)
            else:
                tl.store(parts + part[:, None] * DIM + at[None, :], result, mask=stored)
        if not alone:
            tl.store(weights + part, top + tl.log2(divisor), mask=live)
            tl.debug_barrier()  # the whole program's stores come before its sign
            counter = counters + first * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                tl.store(counter, 0)
                _combine(
                    out, parts, weights, first_row, queries, kv_head, first, count,
                    KV_HEADS, SHARED, DIM, DIM_PADDED, ROWS, MAX_SPLITS, AT_ONCE,
                )  # fmt: skip
        queries, first_row, position, begin, end, table_row, step, behind, count, first = following
        number, kv_head = next_number, next_head
    if not SMALL:  # noqa: SIM102  # known when it is compiled
        if tl.atomic_add(taken + 1, 1, sem="acq_rel") == programs - 1:  # nobody takes any more
            tl.store(taken, 0)
            tl.store(taken + 1, 0)


@triton.jit
def _item(items: tl.tensor, capacity: tl.tensor, number: tl.tensor) -> tuple[tl.tensor, ...]:
    """Queries, first row, position, begin, end, table, step, the next one, its tile's parts and the first of them;
    nothing from 0 to 0 if there is none."""
    item, there = items + number, number < capacity
    queries = tl.load(item + QUERIES * capacity, mask=there, other=0)
    return (
        queries,
        tl.load(item + ROW * capacity, mask=there, other=0),
        tl.load(item + POSITION * capacity, mask=there, other=0),
        tl.where(queries > 0, tl.load(item + BEGIN * capacity, mask=there, other=0), 0),
        tl.where(queries > 0, tl.load(item + END * capacity, mask=there, other=0), 0),
        tl.load(item + TABLE * capacity, mask=there, other=0),
        tl.load(item + STEP * capacity, mask=there, other=0),
        tl.load(item + NEXT * capacity, mask=there, other=0),
        tl.load(item + PARTS * capacity, mask=there, other=0),
        tl.load(item + FIRST * capacity, mask=there, other=0),
    )


@triton.jit
def _visit(
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tuple,
    blocks: tl.tuple,
    tile: tl.tensor,
    positions: tl.tensor,
    seen: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    least: tl.tensor,
    begin: tl.tensor,
    until: tl.tensor,
    end: tl.tensor,
    next_table: tl.tensor,
    next_begin: tl.tensor,
    next_end: tl.tensor,
    step: tl.tensor,
    scale: tl.tensor,
    TREE: tl.constexpr,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tuple, tl.tuple]:
    """Online softmax over the keys in [begin, until), of which none before `least` is seen: each row's maximum (log2),
    its sum of weights, and the weighted values, PIECE of their elements each. Unless MASKED, all rows see all of them.
    `blocks` are those of the first KEYS of them; those that lie in [next_begin, next_end) of `next_table` come
    back. All begin with a multiple of KEYS."""
    lane = tl.arange(0, KEYS)
    column = tl.arange(0, DIM_PADDED)
    # Counted from `least`, so that a comparison does: without a sign, those before it are beyond all others.
    there = (end - least).to(tl.uint32)
    visible_to = tl.maximum(tl.minimum(positions + 1, end) - least, 0).to(tl.uint32)
    # Blocks are looked up an iteration ahead, in registers, by the last one for what is visited next: were their ids
    # loaded where they are used, the compiler would pipeline them, too, and wait for the keys and values as often.
    for start in range(begin, until, KEYS):
        key = start + lane
        counted = (key - least).to(tl.uint32)
        inside = counted < there
        last = start + KEYS >= until
        following = _blocks(
            tl.where(last, next_table, table),
            tl.where(last, next_begin, start + KEYS),
            tl.where(last, next_end, until),
            BLOCK_SIZE,
            KEYS,
        )
        place = _places(blocks, start, BLOCK_SIZE, KEYS, KV_HEADS * DIM)[:, None] + kv_head * DIM
        if MASKED or DIM < DIM_PADDED:
            k = tl.load(keys + place + column[None, :], mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
        else:
            k = tl.load(keys + place + column[None, :])
        v: tl.tuple = ()
        for piece in tl.static_range(DIM_PADDED // PIECE):
            at = (piece * PIECE + tl.arange(0, PIECE))[None, :]
            if MASKED or DIM < DIM_PADDED:
                v += (tl.load(values + place + at, mask=inside[:, None] & (at < DIM), other=0.0),)
            else:
                v += (tl.load(values + place + at),)
        scores = tl.dot(tile, tl.trans(k), input_precision="ieee")
        if SOFTCAP > 0:
            scores *= scale
            bound = SOFTCAP * LOG2_E
            scores = bound * (2 * tl.sigmoid(scores * (2 / bound)) - 1)  # bound * tanh(scores / bound)
        if MASKED:
            visible = counted[None, :] < visible_to[:, None]
            nearest = positions
            if TREE:
                own = key - step
                bit = (seen[:, None] >> tl.minimum(tl.maximum(own, 0), MOST_OWN - 1).to(tl.int64)[None, :]) & 1
                visible = visible & ((own < 0)[None, :] | (bit == 1))
                nearest = tl.where(seen == -1, positions, step + _ones(seen) - 1)
            if WINDOW > 0:
                visible = visible & (key[None, :] > nearest[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        highest = tl.max(scores, axis=1)
        higher = tl.maximum(top, highest if SOFTCAP > 0 else highest * scale)
        # Where masked, a row may not have seen anything yet.
        finite = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        # Scaled on the way, in one instruction.
        shares = tl.exp2(scores - finite[:, None] if SOFTCAP > 0 else scores * scale - finite[:, None])
        fade = tl.exp2(top - finite)
        total = total * fade + tl.sum(shares, axis=1)
        shares = shares.to(values.dtype.element_ty)
        weighted: tl.tuple = ()
        for piece in tl.static_range(DIM_PADDED // PIECE):
            faded = acc[piece] * fade[:, None]
            weighted += (tl.dot(shares, v[piece], faded, input_precision="ieee"),)
        acc = weighted
        top = higher
        blocks = following
    return top, total, acc, blocks


@triton.jit
def _blocks(
    table: tl.tensor, begin: tl.tensor, end: tl.tensor, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr
) -> tl.tuple:
    """The blocks that the KEYS from `begin`, a multiple of them, lie in: a few, which all threads look up and choose
    from; where they are more or end anywhere, [keys], the block of each, which threads have to exchange."""
    BLOCKS: tl.constexpr = _blocks_of(BLOCK_SIZE, KEYS)
    blocks: tl.tuple = ()
    for block in tl.static_range(max(BLOCKS, 1)):
        key = begin + (tl.arange(0, KEYS) if BLOCKS == 0 else block * BLOCK_SIZE)
        blocks += (tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0),)
    return blocks


@triton.constexpr_function
def _blocks_of(block_size: int, keys: int) -> int:
    """How many so many keys lie in; 0: too many, or not always the same."""
    if block_size % keys == 0:
        return 1
    return keys // block_size if keys % block_size == 0 and keys <= 4 * block_size else 0


@triton.jit
def _places(
    blocks: tl.tuple, begin: tl.tensor, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, STRIDE: tl.constexpr
) -> tl.tensor:
    """Where the keys from `begin` lie in the cache, [keys] int64, by elements, STRIDE of which a slot has."""
    BLOCKS: tl.constexpr = _blocks_of(BLOCK_SIZE, KEYS)
    lane = tl.arange(0, KEYS)
    if BLOCKS == 0:
        return (blocks[0].to(tl.int64) * BLOCK_SIZE + (begin + lane) % BLOCK_SIZE) * STRIDE
    first = (blocks[0].to(tl.int64) * BLOCK_SIZE + begin % BLOCK_SIZE) * STRIDE
    place = tl.zeros([KEYS], tl.int64) + first
    for block in tl.static_range(1, BLOCKS):
        place = tl.where(lane >= block * BLOCK_SIZE, blocks[block].to(tl.int64) * (BLOCK_SIZE * STRIDE), place)
    return place + lane % BLOCK_SIZE * STRIDE


@triton.jit
def _ones(words: tl.tensor) -> tl.tensor:
    """How many bits of each int64 are set."""
    pairs = (words & 0x5555555555555555) + ((words >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    bytes_ = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    total = bytes_ + (bytes_ >> 8)
    total += total >> 16
    return ((total + (total >> 32)) & 127).to(tl.int32)


@triton.jit
def _combine(
    out: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    first_row: tl.tensor,
    queries: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """The tile's rows from its `count` parts, a few of both at once."""
    GROUP: tl.constexpr = max(1, min(8, 16384 // (AT_ONCE * DIM_PADDED)))
    column = tl.arange(0, DIM_PADDED)
    for offset in range(0, queries * SHARED, GROUP):
        row = offset + tl.arange(0, GROUP)
        live = row < queries * SHARED
        top, total, acc = _sums(
            parts, weights, row, live, kv_head, first, 0, count, KV_HEADS, DIM, DIM_PADDED, ROWS, AT_ONCE
        )
        if AT_ONCE < MAX_SPLITS:
            for behind in range(AT_ONCE, count, AT_ONCE):
                next_top, next_total, next_acc = _sums(
                    parts, weights, row, live, kv_head, first, behind, count, KV_HEADS, DIM, DIM_PADDED, ROWS, AT_ONCE
                )
                higher = tl.maximum(top, next_top)
                finite = tl.where(higher == float("-inf"), 0.0, higher)
                fade, next_fade = tl.exp2(top - finite), tl.exp2(next_top - finite)
                total = total * fade + next_total * next_fade
                acc = acc * fade[:, None] + next_acc * next_fade[:, None]
                top = higher
        token_head = (first_row + row // SHARED).to(tl.int64) * (KV_HEADS * SHARED) + kv_head * SHARED + row % SHARED
        tl.store(
            out + token_head[:, None] * DIM + column[None, :],
            (acc * (1 / tl.where(total > 0, total, 1.0))[:, None]).to(out.dtype.element_ty),
            mask=live[:, None] & (column < DIM)[None, :],
        )


@triton.jit
def _sums(
    parts: tl.tensor,
    weights: tl.tensor,
    row: tl.tensor,
    live: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of a tile's parts AT_ONCE from the `begin`-th on, for some rows: their maximum (log2), their sum of weights, and
    the weighted results. Behind the first, parts are those that begin with the slots that follow."""
    column = tl.arange(0, DIM_PADDED)
    number = begin + tl.arange(0, AT_ONCE)
    part = tl.where(number == 0, first, (first // 2 + number) * 2).to(tl.int64)
    place = ((part * KV_HEADS + kv_head) * ROWS)[None, :] + row[:, None]
    there = live[:, None] & (number < count)[None, :]
    # Past the first-level cache, which other processors' stores do not reach.
    weight = tl.load(weights + place, mask=there, other=float("-inf"), cache_modifier=".cg")
    values = tl.load(
        parts + place[:, :, None] * DIM + column[None, None, :],
        mask=there[:, :, None] & (column < DIM)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    top = tl.max(weight, axis=1)
    share = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top)[:, None])
    return top, tl.sum(share, axis=1), tl.sum(values * share[:, :, None], axis=1)
