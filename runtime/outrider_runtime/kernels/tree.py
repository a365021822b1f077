"""A step's trees on the device: engine/tree_step.py, speculation/verify.py and kv/compaction.py say what each must do.

Chains launch none of this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_runtime.kernels.once import compiled_once
from outrider_runtime.kernels.sampling import _TEMPERATURE, _nearly_gumbel, _words
from outrider_runtime.kernels.step import TOKENS, _place_of
from outrider_runtime.sampling.table import SamplingTable

PART = 2048  # of the vocabulary, a program each
COLUMNS = 512  # of a row that is moved, a program each


def branches(
    parents: Tensor, slots: Tensor, drafts: Tensor, query_starts: Tensor, owners: Tensor, positions: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """Positions in the texts, [tokens] int32, and ancestors, [tokens] int64, of a feed's tokens, whose KV lies at
    `positions`. `parents` is [slots, drafts]; no draft lies deeper than `depth`."""
    tokens = len(owners)
    deep = torch.empty(tokens, dtype=torch.int32, device=owners.device)
    ancestors = torch.empty(tokens, dtype=torch.int64, device=owners.device)
    _branches[(triton.cdiv(tokens, TOKENS),)](
        parents,
        parents.stride(0),
        slots,
        drafts,
        query_starts,
        owners,
        positions,
        deep,
        ancestors,
        tokens,
        DEPTH=depth,
        BLOCK=TOKENS,
    )
    return deep, ancestors


def frontier(
    ends: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    capacities: Tensor,
    drafts: Tensor,
    top_k: int,
    turn: int,
    *,
    block_size: int,
    nowhere: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the `turn`-th frontier behind each text's `ends` [requests]: positions and KV slots, [requests * top_k] int32,
    and contexts, [requests]."""
    requests = len(ends)
    positions, kv_slots = torch.empty(2, requests * top_k, dtype=torch.int32, device=ends.device).unbind(0)
    contexts = torch.empty(requests, dtype=torch.int32, device=ends.device)
    _frontier[(triton.cdiv(requests * top_k, TOKENS),)](
        ends,
        block_tables,
        block_tables.stride(0),
        block_tables.shape[1] - 1,
        slots,
        capacities,
        drafts,
        positions,
        kv_slots,
        contexts,
        requests,
        turn,
        nowhere,
        TOP_K=top_k,
        BLOCK_SIZE=block_size,
        BLOCK=TOKENS,
    )
    return positions, kv_slots, contexts


def commit(
    texts: Tensor,
    lengths: Tensor,
    parents: Tensor,
    slots: Tensor,
    drafts: Tensor,
    capacities: Tensor,
    first_rows: Tensor,
    sampled: Tensor,
    meant: Tensor,
    results: Tensor,
    ends: Tensor,
    nodes: Tensor,
    stands: Tensor | None,
) -> None:
    """Verification of trees; see speculation/verify.py. Changes texts, lengths, results, `ends` [requests] and `nodes`
    [requests, depth]."""
    _commit[(len(results),)](
        texts,
        texts.stride(0),
        texts.shape[1] - 1,
        lengths,
        parents,
        parents.stride(0),
        slots,
        drafts,
        capacities,
        first_rows,
        sampled,
        len(sampled),
        meant,
        stands,
        results,
        results.stride(0),
        ends,
        nodes,
        DEPTH=nodes.shape[1],
        DEPTH_BLOCK=triton.next_power_of_2(nodes.shape[1]),
        BLOCK=triton.next_power_of_2(parents.shape[1]),
        num_warps=1,
    )


def compact_kv(
    arrays: Tensor, block_tables: Tensor, slots: Tensor, ends: Tensor, nodes: Tensor, block_size: int
) -> None:
    """See kv/compaction.py: move the KV of `nodes` [requests, depth], behind texts of `ends` [requests], next to each
    other; in `arrays` [layers, 2, slots, kv heads, dim]."""
    layers, two, _, kv_heads, dim = arrays.shape
    _move(arrays, layers * two, arrays.stride(1), kv_heads * dim, block_tables, slots, ends, nodes, block_size)


def compact_rows(rows: Tensor, firsts: Tensor, nodes: Tensor) -> None:
    """The same of `rows` [tokens, width], of which a request's begin at `firsts` [requests]; none below 0."""
    _move(rows, 1, 0, rows.shape[1], None, None, firsts, nodes, 0)


def _move(
    array: Tensor,
    layers: int,
    stride: int,
    width: int,
    block_tables: Tensor | None,
    slots: Tensor | None,
    begins: Tensor,
    nodes: Tensor,
    block_size: int,
) -> None:
    requests, depth = nodes.shape
    _compact[(requests, layers, triton.cdiv(width, COLUMNS))](
        array,
        stride,
        block_tables,
        0 if block_tables is None else block_tables.stride(0),
        slots,
        begins,
        nodes,
        BLOCK_SIZE=block_size,
        WIDTH=width,
        DEPTH=depth,
        DEPTH_BLOCK=triton.next_power_of_2(depth),
        COLUMNS=COLUMNS,
    )


def with_noise(logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable) -> Tensor:
    """[rows, vocab] logits over their temperature, with the noise; see sampling/candidates.py. Within 1e-5 of it."""
    rows, vocab = logits.shape
    scores = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    _with_noise[(triton.cdiv(vocab, PART), rows)](
        logits,
        logits.stride(0),
        slots,
        positions,
        table.rows,
        table.rows.view(torch.float32),
        scores,
        VOCAB=vocab,
        WIDTH=table.layout.width,
        PART=PART,
    )
    return scores


@compiled_once
def _branches(
    parents: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    drafts: tl.tensor,
    query_starts: tl.tensor,
    owners: tl.tensor,
    positions: tl.tensor,
    deep: tl.tensor,
    ancestors: tl.tensor,
    tokens: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < tokens
    owner = tl.load(owners + token, mask=there, other=0)
    slot = tl.load(slots + owner, mask=there, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=there, other=0)
    own = token - tl.load(query_starts + owner, mask=there, other=0)
    in_tree = there & (tl.load(drafts + owner, mask=there, other=0) > 0)
    node = tl.where(in_tree, own, -1)
    seen = tl.zeros([BLOCK], tl.int64)
    count = tl.zeros([BLOCK], tl.int32)
    one = tl.full([BLOCK], 1, tl.int64)
    for _ in range(DEPTH + 1):
        on = node >= 0
        seen |= tl.where(on, one << tl.maximum(node, 0).to(tl.int64), 0)
        count += on.to(tl.int32)
        node = tl.load(parents + slot * stride + node - 1, mask=node > 0, other=-1)
    tl.store(deep + token, tl.where(in_tree, position - own + count - 1, position), mask=there)
    tl.store(ancestors + token, tl.where(in_tree, seen, -1), mask=there)


@compiled_once
def _frontier(
    ends: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    last_block: tl.tensor,
    slots: tl.tensor,
    capacities: tl.tensor,
    drafts: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    contexts: tl.tensor,
    requests: tl.tensor,
    turn: tl.tensor,
    nowhere: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request, rank = token // TOP_K, token % TOP_K
    there = request < requests
    slot = tl.load(slots + request, mask=there, other=0).to(tl.int64)
    end = tl.load(ends + request, mask=there, other=1)
    capacity = tl.load(capacities + request, mask=there, other=0)
    capacity = tl.where(tl.load(drafts + request, mask=there, other=0) > 0, capacity, 0)
    place = end + turn * TOP_K + rank
    kv = _place_of(block_tables, table_stride, last_block, slot, place, capacity, nowhere, there, BLOCK_SIZE)
    tl.store(positions + token, end + turn, mask=there)
    tl.store(kv_slots + token, kv, mask=there)
    tl.store(contexts + request, end + (turn + 1) * TOP_K, mask=there & (rank == 0))


@compiled_once
def _commit(
    texts: tl.tensor,
    stride: tl.tensor,
    last_column: tl.tensor,
    lengths: tl.tensor,
    parents: tl.tensor,
    parent_stride: tl.tensor,
    slots: tl.tensor,
    drafts: tl.tensor,
    capacities: tl.tensor,
    first_rows: tl.tensor,
    sampled: tl.tensor,
    rows: tl.tensor,
    meant: tl.tensor,
    stands: tl.tensor,
    results: tl.tensor,
    result_stride: tl.tensor,
    ends: tl.tensor,
    nodes: tl.tensor,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    first = tl.load(first_rows + request)
    drafted = tl.load(drafts + request)
    length = tl.load(lengths + slot)
    text, line, path = texts + slot * stride, results + request * result_stride, nodes + request * DEPTH
    draft = tl.arange(0, BLOCK)
    there = (draft < drafted) & (draft < tl.load(capacities + request) - length)
    token = tl.load(text + tl.minimum(length + draft, last_column), mask=there, other=-1)
    parent = tl.load(parents + slot * parent_stride + draft, mask=there, other=-1)
    turn = tl.arange(0, DEPTH_BLOCK)
    tl.store(path + turn, tl.full([DEPTH_BLOCK], -1, tl.int32), mask=turn < DEPTH)
    tl.debug_barrier()  # all drafts are read before the first is written over
    emitted = 0
    node = 0  # the last that stands
    going = first >= 0
    while going:
        target = tl.load(sampled + tl.minimum(first + node, rows - 1)).to(tl.int32)
        tl.store(text + tl.minimum(length + emitted, last_column), target)
        tl.store(line + 2 + emitted, target)
        follows = there & (parent == node)
        if stands is None:
            follows &= token == target
        else:
            follows &= emitted < tl.load(stands + request)
        node = tl.min(tl.where(follows, draft + 1, BLOCK + 1))
        going = (node <= BLOCK) & (emitted < DEPTH)
        tl.store(path + emitted, node, mask=going)
        emitted += 1
    tl.store(ends + request, length)
    tl.store(lengths + slot, tl.minimum(length + emitted, last_column))  # nobody's stays
    tl.store(line, emitted)
    tl.store(line + 1, tl.load(meant + request))


@triton.jit
def _compact(
    array: tl.tensor,
    stride: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    slots: tl.tensor,
    begins: tl.tensor,
    nodes: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    turn = tl.arange(0, DEPTH_BLOCK)
    node = tl.load(nodes + request * DEPTH + turn, mask=turn < DEPTH, other=-1)
    begin = tl.load(begins + request)
    moves = tl.where(begin < 0, -1, node) > turn + 1
    if tl.max(moves.to(tl.int32)) > 0:
        if block_tables is None:
            source, target = (begin + node).to(tl.int64), (begin + turn + 1).to(tl.int64)
        else:
            table = block_tables + tl.load(slots + request).to(tl.int64) * table_stride
            come, go = tl.where(moves, begin - 1 + node, 0), tl.where(moves, begin + turn, 0)
            source = tl.load(table + come // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + come % BLOCK_SIZE
            target = tl.load(table + go // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + go % BLOCK_SIZE
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        moved = moves[:, None] & (column < WIDTH)[None, :]
        layer = array + tl.program_id(1).to(tl.int64) * stride + column[None, :]
        values = tl.load(layer + source[:, None] * WIDTH, mask=moved)
        tl.debug_barrier()  # one's source may be another's target: all are read before the first is written
        tl.store(layer + target[:, None] * WIDTH, values, mask=moved)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _with_noise(
    logits: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    table_floats: tl.tensor,
    scores: tl.tensor,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    row = tl.program_id(1)
    token = tl.program_id(0) * PART + tl.arange(0, PART)
    inside = token < VOCAB
    score = tl.load(logits + row.to(tl.int64) * stride + token, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + row)
    temperature = tl.load(table_floats + slot * WIDTH + _TEMPERATURE)
    if temperature > 0:
        score = score / temperature + _nearly_gumbel(_words(table + slot * WIDTH, tl.load(positions + row), token))
    tl.store(scores + row.to(tl.int64) * VOCAB + token, score, mask=inside)
