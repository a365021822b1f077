"""Products of a few rows with a weight matrix, as fast as the weights can be read, with their surroundings fused in.

The weights are the left operand, so that the wide side of the tensor-core instruction is theirs and not the rows'.
A norm before the product is folded in: a row's sum of squares is taken on the way, and scales its results at the end.
So are the rotation of queries and keys and the writing of KV behind it: a tile then holds the rows of elements that
turn with one another.

Starting a kernel's programs while the one before drains (programmatic dependent launch) was tried and does not pay: on
an H200 all of Llama-3.1-8B but its attention takes 3.95, 4.04 and 4.10 ms for 1, 5 and 16 rows, and 3.95, 4.01 and
4.21 so, more if the weights are also prefetched into L2; Llama-3.2-1B goes from 0.90 to 1.04 ms and more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_runtime.kernels.compiling import kept_zeros
from outrider_runtime.kernels.limits import padded, shared_memory
from outrider_runtime.layers.rope import Turn

MAX_ROWS = 64
MAX_TILES = 4096  # of a split product
WAVE = 128  # programs that an H100's or H200's 132 multiprocessors run at once, one each


@dataclass(frozen=True, slots=True)
class Tiling:
    """`width` rows of the weights a program, `depth` of their columns a step, `splits` programs along the columns."""

    width: int
    depth: int
    splits: int
    stages: int
    warps: int

    def within(self, limit: int, rows: int, itemsize: int) -> Tiling:
        """With fewer stages, then smaller, until it takes at most `limit` bytes of shared memory, 48 KiB or more."""
        plan = self
        while plan.stages * plan.depth * (plan.width + padded(rows)) * itemsize > limit:
            if plan.stages > 2:
                plan = replace(plan, stages=plan.stages - 1)
            else:
                plan = replace(plan, width=max(32, plan.width // 2), depth=max(32, plan.depth // 2), stages=self.stages)
        return plan


def tiling(outputs: int, inputs: int, rows: int, dtype: torch.dtype, alone: bool) -> Tiling:
    """For an [outputs, inputs] matrix; `alone`: no norm is folded in, which each program would do again, and no gate.

    About one wave of programs, each with much in flight: more, smaller ones are slower, for every kernel pays a ramp at
    its start and its end. Measured on an H200 for Llama-3.1-8B and Llama-3.2-1B by benchmarks/kernels_linear.py.
    """
    if dtype is torch.float32:  # no tensor cores at full precision: small, to compile and to fit
        return Tiling(32, 32, 1, 2, 4)
    enough = 64 if alone else 48  # programs; where each does more, fewer
    width = 128 if outputs >= 96 * 128 else 64 if outputs >= enough * 64 or (alone and outputs >= 2048) else 32
    short = 2048 if rows <= 16 else 4096  # inputs that a program may as well share: it waits for more rows of x besides
    splits = 1
    while splits * triton.cdiv(outputs, width) <= WAVE // 2 and (
        inputs >= 3 * outputs or (inputs // splits <= short and inputs // splits >= 1024)
    ):
        splits *= 2
    if 16 < rows <= 32 and outputs >= 96 * 256:  # as many programs, each reading all of x, as there must be
        return Tiling(256, 128, 1, 3, 8)
    if width == 128:
        return Tiling(128, 128, splits, 5 if rows <= 8 else 3 if rows <= 16 else 4, 8)
    if rows > 16:
        return Tiling(width, 128, splits, 4, 4)
    return Tiling(width, 256, splits, 3 if splits >= 4 else 4, 4)


def product(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    turn: Turn | None = None,
    plan: Tiling | None = None,
) -> Tensor:
    """`residual + act(rms_norm(x) @ weight.T + bias)` of at most 64 rows, accumulated in float32 and rounded once.

    x [rows, inputs]; weight [outputs, inputs], or [2 * outputs, inputs] if `gated`: SiLU of the first half's product
    times the second's. norm [inputs], bias [outputs of the weight], residual [rows, outputs]. All of one dtype and
    contiguous. Returns [rows, outputs].

    With a `turn`, by kernels.rope.rotation() and into arrays of the same dtype, what layers.rope.turn_and_store() makes
    of a product without a residual or gate, but turned before it is rounded.

    Products split along the inputs share counters: one stream a device, and the first call outside of a graph's
    capture. In float16 a norm may overflow here that would not before the product.
    """
    rows, inputs = x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows; a skinny product takes at most {MAX_ROWS}")
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    plan = plan or tiling(weight.shape[0], inputs, rows, x.dtype, alone=norm is None and not gated)
    plan = plan.within(shared_memory(x.device), rows, x.itemsize)
    tiles = triton.cdiv(outputs, plan.width // 2 if gated else plan.width)
    if plan.splits > 1 and tiles > MAX_TILES:
        raise ValueError(f"{tiles} tiles of a split product; at most {MAX_TILES}")
    dim = kv_size = None
    if turn is None:
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    else:
        kv_heads, dim = turn.keys.shape[1:]
        kv_size = kv_heads * dim
        out = torch.empty(rows, outputs // dim - 2 * kv_heads, dim, dtype=x.dtype, device=x.device)
    partial = squares = counters = None
    if plan.splits > 1:
        partial = torch.empty(plan.splits, tiles, plan.width, rows, dtype=torch.float32, device=x.device)
        squares = torch.empty(plan.splits, tiles, rows, dtype=torch.float32, device=x.device)
        counters = _counters(x.device)
    _product[(tiles, plan.splits)](
        x.contiguous(),
        weight,
        out,
        norm,
        bias,
        residual,
        partial,
        squares,
        counters,
        *((None,) * 5 if turn is None else (turn.cosines, turn.sines, turn.keys, turn.values, turn.slots)),
        rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        EPS=eps,
        GATED=gated,
        DIM=dim,
        KV_SIZE=kv_size,
        ROWS=padded(rows),
        WIDTH=plan.width,
        DEPTH=plan.depth,
        SPLITS=plan.splits,
        num_stages=plan.stages,
        num_warps=plan.warps,
    )
    return out


@cache
def _counters(device: torch.device) -> Tensor:
    """How many parts of each tile have arrived. Zero between launches: the last one to arrive sets it back."""
    return kept_zeros(MAX_TILES, device)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    norm: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    partial: tl.tensor,
    part_squares: tl.tensor,
    counters: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    rows: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EPS: tl.constexpr,
    GATED: tl.constexpr,
    DIM: tl.constexpr,
    KV_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    EVEN: tl.constexpr = INPUTS % (DEPTH * SPLITS) == 0
    STEPS: tl.constexpr = (INPUTS + DEPTH * SPLITS - 1) // (DEPTH * SPLITS)
    tile, split = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    HALF: tl.constexpr = WIDTH // 2
    # Past the end they wrap around, so that loads need no mask; such results are not stored.
    if GATED:  # half of the tile's rows are the gate's, the others the same of what it gates
        unit = (tile * HALF + lane % HALF) % OUTPUTS + lane // HALF * OUTPUTS
    elif DIM is not None:  # half are of heads' first halves, the others of what these turn with
        pair = (tile * HALF + lane % HALF) % (OUTPUTS // 2)
        unit = _first_of(pair, DIM) + lane // HALF * (DIM // 2)
    else:
        unit = (tile * WIDTH + lane) % OUTPUTS
    row = tl.arange(0, ROWS)
    column = split * STEPS * DEPTH + tl.arange(0, DEPTH)

    weight_tile = weight + unit[:, None].to(tl.int64) * INPUTS + column[None, :]
    x_tile = x + row[:, None] * INPUTS + column[None, :]
    norm_tile = norm + column if norm is not None else None
    present = row[:, None] < rows
    if DIM is not None:
        cosine, sine, slot = _fetch_turn(cosines, sines, slots, tile, row, rows, OUTPUTS, DIM, KV_SIZE, WIDTH)
    else:
        cosine, sine, slot = None, None, None
    total = tl.zeros([WIDTH, ROWS], dtype=tl.float32)
    squares = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    for step in range(STEPS):
        if EVEN:
            w = tl.load(weight_tile, eviction_policy="evict_first")  # read once a step: leave the cache to the rest
            a = tl.load(x_tile, mask=present, other=0.0)
        else:
            inside = column + step * DEPTH < INPUTS
            w = tl.load(weight_tile, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            a = tl.load(x_tile, mask=present & inside[None, :], other=0.0)
        if norm is not None:
            wide = a.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm_tile) if EVEN else tl.load(norm_tile, mask=column + step * DEPTH < INPUTS, other=0.0)
            a = (wide * scale.to(tl.float32)[None, :]).to(w.dtype)
            norm_tile += DEPTH
        total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
        weight_tile += DEPTH
        x_tile += DEPTH
    square = tl.sum(squares, axis=1)
    if SPLITS == 1:
        if norm is not None:
            total *= tl.rsqrt(square / INPUTS + EPS)[None, :]
        _finish(
            total,
            tile,
            unit,
            row,
            rows,
            out,
            bias,
            residual,
            cosine,
            sine,
            slot,
            keys,
            values,
            OUTPUTS,
            GATED,
            DIM,
            KV_SIZE,
            WIDTH,
        )
    else:
        part = partial + tile * WIDTH * rows + lane[:, None] * rows + row[None, :]
        own_squares = part_squares + tile * rows + row
        tiles = tl.num_programs(0)
        tl.store(part + split * tiles * WIDTH * rows, total, mask=(row < rows)[None, :])
        if norm is not None:
            tl.store(own_squares + split * tiles * rows, square, mask=row < rows)
        tl.debug_barrier()  # all of this program's part is written before its arrival is counted
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([WIDTH, ROWS], dtype=tl.float32)
            square = tl.zeros([ROWS], dtype=tl.float32)
            for other in tl.static_range(SPLITS):  # always in this order, whoever is last: the same sum every time
                place = part + other * tiles * WIDTH * rows
                total += tl.load(place, mask=(row < rows)[None, :], other=0.0, cache_modifier=".cg")
                if norm is not None:
                    place = own_squares + other * tiles * rows
                    square += tl.load(place, mask=row < rows, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            if norm is not None:
                total *= tl.rsqrt(square / INPUTS + EPS)[None, :]
            _finish(
                total,
                tile,
                unit,
                row,
                rows,
                out,
                bias,
                residual,
                cosine,
                sine,
                slot,
                keys,
                values,
                OUTPUTS,
                GATED,
                DIM,
                KV_SIZE,
                WIDTH,
            )


@triton.jit
def _fetch_turn(
    cosines: tl.tensor,
    sines: tl.tensor,
    slots: tl.tensor,
    tile: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    OUTPUTS: tl.constexpr,
    DIM: tl.constexpr,
    KV_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What a tile's pairs turn by, values by nothing, and the slots of rows: asked for before the weights, it has come
    when these are multiplied."""
    pair = tile * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
    turning = (row < rows)[None, :] & (_first_of(pair, DIM) < OUTPUTS - KV_SIZE)[:, None]
    angle = row[None, :] * DIM + (pair % (DIM // 2))[:, None]
    cosine = tl.load(cosines + angle, mask=turning, other=1.0)
    sine = tl.load(sines + DIM // 2 + angle, mask=turning, other=0.0)
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    return cosine, sine, slot


@triton.jit
def _finish(
    total: tl.tensor,
    tile: tl.tensor,
    unit: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    slot: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    DIM: tl.constexpr,
    KV_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Bias, gate, residual or rotation, and store a tile's [width, rows] sums."""
    if bias is not None:
        total += tl.load(bias + unit).to(tl.float32)[:, None]
    if DIM is not None:
        first, second = _halves(total, WIDTH)
        column = _first_of(tile * (WIDTH // 2) + tl.arange(0, WIDTH // 2), DIM)[:, None]
        target, stored = _place(column, row[None, :], rows, out, slot[None, :], keys, values, OUTPUTS, KV_SIZE)
        tl.store(target, (first * cosine - second * sine).to(out.dtype.element_ty), mask=stored)
        tl.store(target + DIM // 2, (second * cosine + first * sine).to(out.dtype.element_ty), mask=stored)
    else:
        if GATED:
            gate, up = _halves(total, WIDTH)
            total = gate * tl.sigmoid(gate) * up
            column = tile * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
        else:
            column = tile * WIDTH + tl.arange(0, WIDTH)
        at = row[None, :] * OUTPUTS + column[:, None]
        stored = (row < rows)[None, :] & (column < OUTPUTS)[:, None]
        if residual is not None:
            total += tl.load(residual + at, mask=stored, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _place(
    column: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    queries: tl.tensor,
    slot: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    OUTPUTS: tl.constexpr,
    KV_SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where heads' elements go, and whether they do: a tile may hold queries, keys and values."""
    QUERIES: tl.constexpr = OUTPUTS - 2 * KV_SIZE
    KEYS_END: tl.constexpr = OUTPUTS - KV_SIZE
    kept = slot * KV_SIZE + column
    kv_target = tl.where(column < KEYS_END, keys + (kept - QUERIES), values + (kept - KEYS_END))
    target = tl.where(column < QUERIES, queries + (row * QUERIES + column), kv_target)
    return target, (row < rows) & (column < OUTPUTS) & ((column < QUERIES) | (slot >= 0))


@triton.jit
def _halves(total: tl.tensor, WIDTH: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    first, second = tl.split(tl.permute(tl.reshape(total, [2, WIDTH // 2, total.shape[1]]), [1, 2, 0]))
    return first, second


@triton.jit
def _first_of(pair: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """The first output of a pair that turns; the other lies half a head behind it."""
    return pair // (DIM // 2) * DIM + pair % (DIM // 2)
