"""Skinny products, with all they fuse, are what torch computes in float64."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.kernels.turning import assert_turned, twins
from torch.nn import functional as F

from outrider_runtime.kernels import skinny
from outrider_runtime.kernels.limits import HOPPER
from outrider_runtime.kernels.skinny import Tiling, product, tiling

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}  # the interpreter does not multiply bfloat16
PLAIN = Tiling(32, 32, 1, 2, 4)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def expected(x, weight, norm=None, eps=0.0, bias=None, residual=None, gated=False):
    x, weight = x.double(), weight.double()
    if norm is not None:
        x = F.rms_norm(x, norm.shape, norm.double(), eps)
    y = F.linear(x, weight, None if bias is None else bias.double())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.double()


def check(x, weight, plan=None, **fused):
    wanted = expected(x, weight, **fused)
    tolerance = TOLERANCE[x.dtype]
    result = product(x, weight, plan=plan, **fused)
    assert result.dtype == x.dtype
    torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 64])
def test_a_product_of_any_few_rows(rows, dtype):
    check(random(rows, 64, dtype=dtype), random(96, 64, dtype=dtype), PLAIN)


@pytest.mark.parametrize(("outputs", "inputs"), [(61, 48), (7, 100), (33, 8), (64, 33)])
@pytest.mark.parametrize("splits", [1, 2])
def test_sizes_that_no_tile_divides(outputs, inputs, splits):
    plan = Tiling(32, 32, splits, 2, 4)
    check(random(3, inputs), random(outputs, inputs), plan, bias=random(outputs), residual=random(3, outputs))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("splits", [1, 2])
def test_a_norm_before_the_product(splits, dtype):
    norm = random(80, dtype=dtype, seed=9)
    plan = Tiling(32, 32, splits, 2, 4)
    check(random(5, 80, dtype=dtype) * 30, random(40, 80, dtype=dtype), plan, norm=norm, eps=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "splits"), [(32, 1), (64, 1), (32, 2)])
def test_a_gate_behind_it(width, splits, dtype):
    x, weight = random(4, 48, dtype=dtype), random(2 * 56, 48, dtype=dtype) / 4
    plan = Tiling(width, 32, splits, 2, 4)
    check(x, weight, plan, norm=random(48, dtype=dtype), eps=1e-6, bias=random(2 * 56, dtype=dtype), gated=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "width", "splits"),
    [
        (1, 4, 2, 64, 64, 1),
        (5, 4, 1, 128, 64, 1),
        (5, 2, 2, 64, 32, 2),  # not grouped, split
        (16, 4, 2, 128, 128, 2),
        (5, 3, 1, 80, 64, 1),  # tiles across heads, and of all kinds
        (17, 3, 1, 24, 32, 2),  # a tile that wraps around
    ],
)
def test_heads_turn_and_their_keys_and_values_are_stored(rows, heads, kv_heads, dim, width, splits, dtype):
    outputs = (heads + 2 * kv_heads) * dim
    x, weight = random(rows, 80, dtype=dtype), random(outputs, 80, dtype=dtype) / 9
    bias, norm = random(outputs, dtype=dtype), random(80, dtype=dtype, seed=9)
    ours, twin = twins(rows, kv_heads, dim, dtype)
    plan = Tiling(width, 32, splits, 2, 4)
    queries = product(x, weight, norm=norm, eps=1e-5, bias=bias, turn=ours, plan=plan)
    assert_turned(queries, ours, expected(x, weight, norm, 1e-5, bias), twin, TOLERANCE[dtype])


def test_parts_of_a_split_product_are_summed_again_and_again_to_the_same():
    x, weight, residual = random(5, 256), random(70, 256), random(5, 70)
    plan = Tiling(32, 32, 4, 2, 4)
    check(x, weight, plan, residual=residual)
    again = [product(x, weight, residual=residual, plan=plan) for _ in range(2)]
    assert torch.equal(*again)
    assert not skinny._counters(x.device).any()


def test_rows_do_not_change_one_another():
    x, weight = random(16, 64), random(48, 64)
    whole = product(x, weight, plan=PLAIN)
    assert torch.equal(whole[5:8], product(x[5:8], weight, plan=PLAIN))


@pytest.mark.parametrize(
    ("outputs", "inputs", "alone", "width", "splits"),
    [
        (6144, 4096, False, 64, 1),  # Llama-3.1-8B: qkv
        (4096, 4096, True, 64, 1),  # o
        (28672, 4096, False, 128, 1),  # gate and up
        (4096, 14336, True, 64, 2),  # down
        (128256, 4096, True, 128, 1),  # head
        (3072, 2048, False, 64, 2),  # Llama-3.2-1B: qkv
        (2048, 2048, True, 64, 4),  # o
        (16384, 2048, False, 128, 1),  # gate and up
        (2048, 8192, True, 64, 4),  # down
        (61, 32, True, 32, 1),
    ],
)
def test_a_tiling_is_about_one_wave_of_large_programs(outputs, inputs, alone, width, splits):
    plan = tiling(outputs, inputs, 5, torch.bfloat16, alone)
    assert (plan.width, plan.splits) == (width, splits)


@pytest.mark.parametrize(
    ("outputs", "inputs", "alone", "width", "splits"),
    [
        (6144, 4096, True, 64, 1),
        (4096, 4096, True, 64, 2),
        (28672, 4096, False, 256, 1),
        (4096, 14336, True, 64, 2),
        (128256, 4096, True, 256, 1),
        (16384, 2048, False, 128, 1),
    ],
)
def test_programs_of_more_rows_are_wider_or_share_inputs_as_each_reads_all_of_these(
    outputs, inputs, alone, width, splits
):
    plan = tiling(outputs, inputs, 20, torch.bfloat16, alone)
    assert (plan.width, plan.splits) == (width, splits)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="65 rows; a skinny product takes at most 64"):
        product(random(65, 32), random(32, 32))


@pytest.mark.parametrize("rows", [1, 5, 16, 20, 32, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (28672, 4096), (128256, 4096), (2048, 8192)])
def test_tiles_are_cut_to_a_gpu_s_shared_memory_and_stay_where_there_is_a_hopper_s(outputs, inputs, rows):
    plan = tiling(outputs, inputs, rows, torch.bfloat16, alone=True)
    assert plan.within(HOPPER, rows, 2) == plan
    for limit in (163 << 10, 99 << 10, 48 << 10):
        cut = plan.within(limit, rows, 2)
        assert cut.stages * cut.depth * (cut.width + max(16, rows)) * 2 <= limit
        assert cut.stages >= 2
        assert cut.width <= plan.width
