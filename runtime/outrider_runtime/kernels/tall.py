"""Products of many rows and what follows them as one kernel, on Hopper: SwiGLU's gate (Shazeer, arXiv 2002.05202), or
the turning of heads and the storing of keys and values.

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
FEWEST_ROWS = 112
# Of the processors' time, padding being no use: below it the library's smaller tiles are faster. Up to 256 rows it
# waits for weights as well.
LEAST_USE, LEAST_USE_OF_FEW = 0.9, 0.8


def gating_pays(x: Tensor, weight: Tensor) -> bool:
    """Whether gated_product() takes these, and sooner than the library and an activation. Measured on an H200 by
    benchmarks/kernels_linear.py: 4 to 7 % of all of a layer's products at 1,280 rows, 2 to 5 % at 2,048 and 8,192."""
    return weight.shape[0] % 16 == 0 and _pays(x, weight)


def turning_pays(x: Tensor, weight: Tensor, turn: Turn) -> bool:
    """Whether turned_product() takes these, and sooner than the library and the kernel behind it: of heads of 64 1 to 2
    % of a layer's products, of those of 128 up to 1 %. A tile holds whole heads, all of queries, keys or values."""
    kv_heads, dim = turn.keys.shape[1:]
    apart = kv_heads * dim // 2 % WIDTH == 0 == weight.shape[0] // 2 % WIDTH
    return dim in (32, 64, 128) and apart and _pays(x, weight)


def _pays(x: Tensor, weight: Tensor) -> bool:
    rows, inputs, columns = x.shape[0], weight.shape[1], weight.shape[0] // 2
    if x.dtype not in (torch.bfloat16, torch.float16) or inputs % 8:
        return False
    if rows < FEWEST_ROWS or not hopper(x.device):
        return False
    programs = processors(x.device)
    tiles = _tiles(rows, columns)
    whole = _whole(tiles, programs)
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
    _launch(x, halves, programs, outs=outs, bias=None, turn=None)
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
    _launch(x, halves, programs, outs=(out, out), bias=bias, turn=turn)
    return out


def _launch(
    x: Tensor,
    halves: Tensor,
    programs: int | None,
    outs: tuple[TensorDescriptor | Tensor, ...],
    bias: Tensor | None,
    turn: Turn | None,
) -> None:
    """`halves` [2, groups, columns of a group, inputs]."""
    rows, inputs = x.shape
    _, groups, group, _ = halves.shape
    programs = programs or processors(x.device)
    tiles = _tiles(rows, groups * group)
    whole = _whole(tiles, programs)
    _tall[(min(programs, 2 * tiles - whole),)](
        described(x.contiguous(), [ROWS, DEPTH]),
        *(described(halves, _box(width, group)) for width in (WIDTH, WIDTH // 2)),
        *outs,
        bias,
        *((None,) * 5 if turn is None else (turn.cosines, turn.sines, turn.keys, turn.values, turn.slots)),
        rows,
        whole,
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
    rows: tl.tensor,
    whole: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Two halves of COLUMNS: of heads that are GROUP a half, or, where there are no KV_HEADS, gates and the rest."""
    HALF: tl.constexpr = WIDTH // 2
    tall, wide = tl.cdiv(rows, ROWS), (COLUMNS + WIDTH - 1) // WIDTH
    for tile in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=True):
        row, column = _tile_at(tile, tall, wide)
        first, second = _tile(x, weight, row * ROWS, column * WIDTH, GROUP, INPUTS, ROWS, WIDTH, DEPTH)
        _store(
            first, second, out, bias, cosines, sines, keys, values, slots, rows, row * ROWS, column * WIDTH,
            COLUMNS, GROUP, KV_HEADS, ROWS, WIDTH,
        )  # fmt: skip
    for half in tl.range(2 * whole + tl.program_id(0), 2 * tall * wide, tl.num_programs(0)):
        row, column = _tile_at(half // 2, tall, wide)
        at = column * WIDTH + half % 2 * HALF
        first, second = _tile(x, weight_half, row * ROWS, at, GROUP, INPUTS, ROWS, HALF, DEPTH)
        _store(
            first, second, out_half, bias, cosines, sines, keys, values, slots, rows, row * ROWS, at,
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
def _store(
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
    if KV_HEADS == 0:
        out.store([row, column], (first * tl.sigmoid(first) * second).to(out.dtype))
    else:
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
