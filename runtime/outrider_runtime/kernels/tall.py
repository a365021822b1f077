"""Products of many rows and what follows them as one kernel, on Hopper: SwiGLU's gate (Shazeer, arXiv 2002.05202), the
turning of heads and the storing of keys and values, or the search for the largest.

The library's product writes what a kernel behind it reads again: at 1,280 rows of Llama-3.1-8B that kernel takes a
fourteenth of the product's time where it gates, a twelfth where it turns. Each combines two halves: gates and what they
gate, the first halves of heads and the second ones. So a tile holds the same columns of both. A program a processor
walks the tiles, whose operands the tensor memory accelerator brings. Tiles of a last round that would leave half of the
processors or more without one are done in halves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider_runtime.kernels.compiling import described
from outrider_runtime.kernels.limits import hopper, processors
from outrider_runtime.layers.rope import Turn

ROWS, WIDTH, DEPTH = 128, 128, 64  # of a tile: rows, columns of each half, inputs a step
STAGES, WARPS = 4, 8
GATED, TURNED, LARGEST = (tl.constexpr(end) for end in range(3))  # what becomes of a tile
FEWEST_ROWS = 112
# Of the processors' time, padding being no use: below it the library's smaller tiles are faster. Up to 256 rows it
# waits for weights as well.
LEAST_USE, LEAST_USE_OF_FEW = 0.9, 0.8


def gating_pays(rows: int, weight: Tensor) -> bool:
    """Whether gated_product() takes so many, and sooner than the library and an activation. Measured on an H200 by
    benchmarks/kernels_linear.py: 4 to 7 % of all of a layer's products at 1,280 rows, 2 to 5 % at 2,048 and 8,192."""
    return weight.shape[0] % 16 == 0 and _pays(rows, weight)


def turning_pays(rows: int, weight: Tensor, turn: Turn) -> bool:
    """Whether turned_product() takes so many, and sooner than the library and the kernel behind it: of heads of 64 1 to
    2 % of a layer's products, of those of 128 up to 1 %. A tile holds whole heads, all of queries, keys or values."""
    kv_heads, dim = turn.keys.shape[1:]
    apart = kv_heads * dim // 2 % WIDTH == 0 == weight.shape[0] // 2 % WIDTH
    return dim in (32, 64, 128) and apart and _pays(rows, weight)


def largest_pays(rows: int, weight: Tensor) -> bool:
    """Whether largest_of_product() takes so many, and sooner than the library and a search: of the logits of
    Llama-3.1-8B by 4 to 6 %, but for 256 rows, where it is as fast."""
    return weight.shape[0] % 2 == 0 and _pays(rows, weight, halves=False)


def _pays(rows: int, weight: Tensor, *, halves: bool = True) -> bool:
    """`halves`: tiles of a last round may be done in them."""
    inputs, columns = weight.shape[1], weight.shape[0] // 2
    if weight.dtype not in (torch.bfloat16, torch.float16) or inputs % 8:
        return False
    if rows < FEWEST_ROWS or not hopper(weight.device):
        return False
    programs = processors(weight.device)
    tiles = _tiles(rows, columns)
    whole = _whole(tiles, programs) if halves else tiles
    rounds = -(-whole // programs) + 0.5 * (whole < tiles)
    use = rows / ROWS * columns / WIDTH / (programs * rounds)
    return use >= (LEAST_USE_OF_FEW if rows <= 2 * ROWS else LEAST_USE)


def gated_product(x: Tensor, weight: Tensor, *, programs: int | None = None) -> Tensor:
    """SiLU of the first half of `x @ weight.T`'s columns times the second, by way of float32, rounded once.

    x [rows, inputs], weight [2 * outputs, inputs], of one 16-bit dtype, contiguous, both sizes multiples of 8. Returns
    [rows, outputs]. `programs`: how many walk the tiles; one a processor.
    """
    rows, outputs = x.shape[0], weight.shape[0] // 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    halves = weight.view(2, 1, outputs, -1)
    outs = described(out, [ROWS, WIDTH]), described(out, [ROWS, WIDTH // 2])
    _launch(x, halves, GATED, programs, outs=outs)
    return out


def turned_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, turn: Turn, *, programs: int | None = None
) -> Tensor:
    """`x @ weight.T + bias`, the heads of queries, keys and values, turned by kernels.rope.rotation()'s by way of
    float32 and rounded once. Keys and values go where the turn says, which turning_pays() looked at.

    x [rows, inputs], weight [(heads + 2 * kv heads) * dim, inputs], bias [(heads + 2 * kv heads) * dim], of one 16-bit
    dtype, contiguous. Returns the queries, [rows, heads, dim]. `programs`: how many walk the tiles; one a processor.
    """
    kv_heads, dim = turn.keys.shape[1:]
    heads = weight.shape[0] // dim
    out = torch.empty(x.shape[0], heads - 2 * kv_heads, dim, dtype=x.dtype, device=x.device)
    halves = weight.view(heads, 2, dim // 2, -1).transpose(0, 1)
    _launch(x, halves, TURNED, programs, outs=(out, out), bias=bias, turn=turn)
    return out


def largest_of_product(
    x: Tensor,
    weight: Tensor,
    *,
    count: Tensor | None = None,
    places: Tensor | None = None,
    out: Tensor | None = None,
    programs: int | None = None,
) -> Tensor:
    """Where each row of `x @ weight.T`, rounded to its dtype, is largest: the first of such columns.

    x [rows, inputs], weight [outputs, inputs], of one 16-bit dtype, contiguous, inputs a multiple of 8, outputs even.
    Returns [rows] int32. `count` [1] int32: only of so many, the first ones. `places` [rows] int32: where these are to
    be in `out`, int32. `programs`: how many walk the tiles; one a processor.
    """
    rows, outputs = x.shape[0], weight.shape[0]
    parts = -(-outputs // (2 * WIDTH))
    largest = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    columns = torch.empty(rows, parts, dtype=torch.int32, device=x.device)
    out = torch.empty(rows, dtype=torch.int32, device=x.device) if out is None else out
    _launch(x, weight.view(2, 1, outputs // 2, -1), LARGEST, programs, outs=(largest, columns), count=count)
    _first_of_largest[(rows,)](
        largest,
        columns,
        count,
        places,
        out,
        LAST=outputs - 1,
        PARTS=parts,
        PART_BLOCK=triton.next_power_of_2(parts),
        num_warps=1,
    )
    return out


def _launch(
    x: Tensor,
    halves: Tensor,
    end: tl.constexpr,
    programs: int | None,
    outs: tuple[TensorDescriptor | Tensor, ...],
    bias: Tensor | None = None,
    turn: Turn | None = None,
    count: Tensor | None = None,
) -> None:
    """`halves` [2, groups, columns of a group, inputs]."""
    rows, inputs = x.shape
    _, groups, group, _ = halves.shape
    programs = programs or processors(x.device)
    tiles = _tiles(rows, groups * group)
    whole = tiles if end is LARGEST else _whole(tiles, programs)
    _tall[(min(programs, 2 * tiles - whole),)](
        described(x.contiguous(), [ROWS, DEPTH]),
        *(described(halves, _box(width, group)) for width in (WIDTH, WIDTH // 2)),
        *outs,
        bias,
        *((None,) * 5 if turn is None else (turn.cosines, turn.sines, turn.keys, turn.values, turn.slots)),
        count,
        rows,
        whole,
        END=end.value,
        COLUMNS=groups * group,
        GROUP=group,
        KV_HEADS=0 if turn is None else turn.keys.shape[1],
        INPUTS=inputs,
        ROWS=ROWS,
        WIDTH=WIDTH,
        DEPTH=DEPTH,
        num_stages=STAGES,
        num_warps=WARPS,
    )


def _box(width: int, group: int) -> list[int]:
    """Of so many columns of both halves, the inputs of a step."""
    groups = max(1, width // group)
    return [2, groups, width // groups, DEPTH]


def _tiles(rows: int, columns: int) -> int:
    return -(-rows // ROWS) * -(-columns // WIDTH)


def _whole(tiles: int, programs: int) -> int:
    """How many are not done in halves."""
    rest = tiles % programs
    return tiles - rest if 2 * rest <= programs else tiles


@triton.jit(do_not_specialize=["rows", "whole"])
def _tall(
    x: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    weight_half: tl.tensor_descriptor,
    out: tl.tensor_descriptor,
    out_half: tl.tensor_descriptor,
    bias: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    rows: tl.tensor,
    whole: tl.tensor,
    END: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Two halves of COLUMNS: gates and the rest, or those of heads that are GROUP a half, or whatever they are. `out`
    is written by whole tiles, `out_half` by halves; or they are what is largest in each tile and where."""
    HALF: tl.constexpr = WIDTH // 2
    if count is not None:
        rows = tl.load(count)
    tall, wide = tl.cdiv(rows, ROWS), (COLUMNS + WIDTH - 1) // WIDTH
    if END == LARGEST:
        whole = tall * wide
    for tile in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=True):
        row, column = _tile_at(tile, tall, wide)
        row, column = row * ROWS, column * WIDTH
        first, second = _tile(x, weight, row, column, GROUP, INPUTS, ROWS, WIDTH, DEPTH)
        if END == GATED:
            out.store([row, column], _gate(first, second).to(out.dtype))
        elif END == TURNED:
            _turn(
                first, second, out, bias, cosines, sines, keys, values, slots, rows, row, column,
                COLUMNS, GROUP, KV_HEADS, ROWS, WIDTH,
            )  # fmt: skip
        else:
            _keep_largest(first, second, out, out_half, x.dtype, rows, row, column, COLUMNS, ROWS, WIDTH)
    if END != LARGEST:
        for half in tl.range(2 * whole + tl.program_id(0), 2 * tall * wide, tl.num_programs(0)):
            row, column = _tile_at(half // 2, tall, wide)
            row, column = row * ROWS, column * WIDTH + half % 2 * HALF
            first, second = _tile(x, weight_half, row, column, GROUP, INPUTS, ROWS, HALF, DEPTH)
            if END == GATED:
                out_half.store([row, column], _gate(first, second).to(out_half.dtype))
            else:
                _turn(
                    first, second, out, bias, cosines, sines, keys, values, slots, rows, row, column,
                    COLUMNS, GROUP, KV_HEADS, ROWS, HALF,
                )  # fmt: skip


@triton.jit
def _tile_at(tile: tl.tensor, tall: tl.tensor, wide: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Its row and column of tiles: eight columns after eight, so that what programs read at once stays in L2."""
    TOGETHER: tl.constexpr = 8
    first = tile // (TOGETHER * tall) * TOGETHER
    within = tile % (TOGETHER * tall)
    across = min(wide - first, TOGETHER)
    return within // across, first + within % across


@triton.jit
def _tile(
    x: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    row: tl.tensor,
    column: tl.tensor,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Of a tile's columns, [rows, width] each."""
    both = tl.zeros((ROWS, 2 * WIDTH), tl.float32)
    for at in range(0, INPUTS, DEPTH):
        pair = weight.load([0, column // GROUP, column % GROUP, at]).reshape(2 * WIDTH, DEPTH)
        both = tl.dot(x.load([row, at]), pair.T, both)
    first, second = tl.split(tl.permute(tl.reshape(both, (ROWS, 2, WIDTH)), (0, 2, 1)))
    return first, second


@triton.jit
def _gate(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    return first * tl.sigmoid(first) * second


@triton.jit
def _turn(
    first: tl.tensor,
    second: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    rows: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    PART: tl.constexpr = min(GROUP, WIDTH)  # of a head's half, [heads, part] a tile
    HEADS: tl.constexpr = WIDTH // PART
    KEYS_FROM: tl.constexpr = COLUMNS // GROUP - 2 * KV_HEADS
    VALUES_FROM: tl.constexpr = COLUMNS // GROUP - KV_HEADS
    first, second = tl.reshape(first, (ROWS, HEADS, PART)), tl.reshape(second, (ROWS, HEADS, PART))
    head, within = column // GROUP, tl.multiple_of(column % GROUP, PART) + tl.arange(0, PART)
    heads = head + tl.arange(0, HEADS)
    if bias is not None:
        place = bias + heads[:, None] * 2 * GROUP + within[None, :]
        first += tl.load(place).to(tl.float32)[None, :, :]
        second += tl.load(place + GROUP).to(tl.float32)[None, :, :]
    token = row + tl.arange(0, ROWS)
    angle = token[:, None] * 2 * GROUP + within[None, :]
    turning = (token < tl.where(head < VALUES_FROM, rows, 0))[:, None]
    cosine = tl.load(cosines + angle, mask=turning, other=1.0)[:, None, :]
    sine = tl.load(sines + GROUP + angle, mask=turning, other=0.0)[:, None, :]
    slot = tl.load(slots + token, mask=token < rows, other=-1)
    is_query, is_value = head < KEYS_FROM, head >= VALUES_FROM
    target = tl.where(is_query, out, tl.where(is_value, values, keys))
    at = heads - tl.where(is_query, 0, tl.where(is_value, VALUES_FROM, KEYS_FROM))
    size = tl.where(is_query, KEYS_FROM, KV_HEADS)
    place = tl.where(is_query, token, slot).to(tl.int64)
    stored = tl.where(is_query, token < rows, slot >= 0)
    where = target + (place[:, None] * size + at[None, :])[:, :, None] * 2 * GROUP + within[None, None, :]
    stored = stored[:, None, None]
    tl.store(where, (first * cosine - second * sine).to(target.dtype.element_ty), mask=stored)
    tl.store(where + GROUP, (second * cosine + first * sine).to(target.dtype.element_ty), mask=stored)


@triton.jit
def _keep_largest(
    first: tl.tensor,
    second: tl.tensor,
    largest: tl.tensor,
    columns: tl.tensor,
    dtype: tl.constexpr,
    rows: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Of the tile, rounded. Where nothing equals it, which is where all are no numbers, the last column there is."""
    PARTS: tl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    LAST: tl.constexpr = 2 * COLUMNS - 1
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    at = column + tl.arange(0, WIDTH)[None, :]
    if COLUMNS % WIDTH > 0:
        first = tl.where(at < COLUMNS, first, -float("inf"))
        second = tl.where(at < COLUMNS, second, -float("inf"))
    top = tl.maximum(tl.max(first, axis=1), tl.max(second, axis=1))
    place = tl.min(tl.where(first == top[:, None], at, LAST), axis=1)
    place = tl.minimum(place, tl.min(tl.where(second == top[:, None], COLUMNS + at, LAST), axis=1))
    token = row + tl.arange(0, ROWS)
    part = token * PARTS + column // WIDTH
    tl.store(largest + part, top, mask=token < rows)
    tl.store(columns + part, place, mask=token < rows)


@triton.jit
def _first_of_largest(
    largest: tl.tensor,
    columns: tl.tensor,
    count: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    LAST: tl.constexpr,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
) -> None:
    """Of a row's parts, with _keep_largest()'s `LAST`."""
    row, part = tl.program_id(0), tl.arange(0, PART_BLOCK)
    there = part < PARTS
    place, counts = row, True
    if places is not None:
        place = tl.load(places + row)
    if count is not None:
        counts = row < tl.load(count)
        there = part < tl.where(counts, PARTS, 0)
    top = tl.load(largest + row * PARTS + part, mask=there, other=-float("inf"))
    column = tl.load(columns + row * PARTS + part, mask=there, other=LAST)
    tl.store(out + place, tl.min(tl.where(top == tl.max(top), column, LAST)), mask=counts)
