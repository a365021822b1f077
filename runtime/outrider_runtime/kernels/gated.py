"""SwiGLU's two projections and its activation (Shazeer, arXiv 2002.05202) as one product of many rows, on Hopper.

The library's product writes gates and what they gate for a kernel behind it to read again: at 1,280 rows of
Llama-3.1-8B that kernel takes a fourteenth of the product's time. Here a tile holds the same columns of both. A program
a processor walks the tiles, whose operands the tensor memory accelerator brings. Tiles of a last round that would leave
half of the processors or more without one are done in halves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_runtime.kernels.compiling import described
from outrider_runtime.kernels.limits import hopper, processors

ROWS, WIDTH, DEPTH = 128, 128, 64  # of a tile: rows, outputs, inputs a step
STAGES, WARPS = 4, 8
FEWEST_ROWS = 112
# Of the processors' time, padding being no use: below it the library's smaller tiles are faster. Up to 256 rows it
# waits for weights as well.
LEAST_USE, LEAST_USE_OF_FEW = 0.9, 0.8


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether gated_product() takes these, and sooner than the library and an activation. Measured on an H200 by
    benchmarks/kernels_linear.py: 4 to 7 % of all of a layer's products at 1,280 rows, 2 to 5 % at 2,048 and 8,192."""
    rows, inputs, outputs = x.shape[0], weight.shape[1], weight.shape[0] // 2
    if x.dtype not in (torch.bfloat16, torch.float16) or inputs % 8 or outputs % 8:
        return False
    if rows < FEWEST_ROWS or not hopper(x.device):
        return False
    programs = processors(x.device)
    tiles = _tiles(rows, outputs)
    whole = _whole(tiles, programs)
    rounds = -(-whole // programs) + 0.5 * (whole < tiles)
    use = rows / ROWS * outputs / WIDTH / (programs * rounds)
    return use >= (LEAST_USE_OF_FEW if rows <= 2 * ROWS else LEAST_USE)


def gated_product(x: Tensor, weight: Tensor, *, programs: int | None = None) -> Tensor:
    """SiLU of the first half of `x @ weight.T`'s columns times the second, by way of float32, rounded once.

    x [rows, inputs], weight [2 * outputs, inputs], of one 16-bit dtype, contiguous, both sizes multiples of 8. Returns
    [rows, outputs]. `programs`: how many walk the tiles; one a processor.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    programs = programs or processors(x.device)
    tiles = _tiles(rows, outputs)
    whole = _whole(tiles, programs)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    pairs = weight.view(2, outputs, inputs)
    _gated[(min(programs, 2 * tiles - whole),)](
        described(x.contiguous(), [ROWS, DEPTH]),
        described(pairs, [2, WIDTH, DEPTH]),
        described(pairs, [2, WIDTH // 2, DEPTH]),
        described(out, [ROWS, WIDTH]),
        described(out, [ROWS, WIDTH // 2]),
        rows,
        whole,
        OUTPUTS=outputs,
        INPUTS=inputs,
        ROWS=ROWS,
        WIDTH=WIDTH,
        DEPTH=DEPTH,
        num_stages=STAGES,
        num_warps=WARPS,
    )
    return out


def _tiles(rows: int, outputs: int) -> int:
    return -(-rows // ROWS) * -(-outputs // WIDTH)


def _whole(tiles: int, programs: int) -> int:
    """How many are not done in halves."""
    rest = tiles % programs
    return tiles - rest if 2 * rest <= programs else tiles


@triton.jit(do_not_specialize=["rows", "whole"])
def _gated(
    x: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    weight_half: tl.tensor_descriptor,
    out: tl.tensor_descriptor,
    out_half: tl.tensor_descriptor,
    rows: tl.tensor,
    whole: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    HALF: tl.constexpr = WIDTH // 2
    tall, wide = tl.cdiv(rows, ROWS), (OUTPUTS + WIDTH - 1) // WIDTH
    for tile in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=True):
        row, column = _place(tile, tall, wide)
        _gated_tile(x, weight, out, row * ROWS, column * WIDTH, INPUTS, ROWS, WIDTH, DEPTH)
    for half in tl.range(2 * whole + tl.program_id(0), 2 * tall * wide, tl.num_programs(0)):
        row, column = _place(half // 2, tall, wide)
        _gated_tile(x, weight_half, out_half, row * ROWS, column * WIDTH + half % 2 * HALF, INPUTS, ROWS, HALF, DEPTH)


@triton.jit
def _place(tile: tl.tensor, tall: tl.tensor, wide: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Its row and column of tiles: eight columns after eight, so that what programs read at once stays in L2."""
    TOGETHER: tl.constexpr = 8
    first = tile // (TOGETHER * tall) * TOGETHER
    within = tile % (TOGETHER * tall)
    across = min(wide - first, TOGETHER)
    return within // across, first + within % across


@triton.jit
def _gated_tile(
    x: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    out: tl.tensor_descriptor,
    row: tl.tensor,
    column: tl.tensor,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    both = tl.zeros((ROWS, 2 * WIDTH), tl.float32)
    for at in range(0, INPUTS, DEPTH):
        pair = weight.load([0, column, at]).reshape(2 * WIDTH, DEPTH)
        both = tl.dot(x.load([row, at]), pair.T, both)
    gate, up = tl.split(tl.permute(tl.reshape(both, (ROWS, 2, WIDTH)), (0, 2, 1)))
    out.store([row, column], (gate * tl.sigmoid(gate) * up).to(out.dtype))
