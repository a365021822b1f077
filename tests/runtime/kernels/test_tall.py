"""Products of many rows, with what follows them, are what torch computes in float64, whole tiles and halves alike."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.kernels.turning import assert_turned, twins
from torch.nn import functional as F

from outrider_runtime.kernels.tall import (
    gated_product,
    gating_pays,
    largest_of_product,
    largest_pays,
    turned_product,
    turning_pays,
)
from outrider_runtime.layers.rope import Turn


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "programs"),
    [
        (128, 128, 64, 1),  # one whole tile
        (200, 320, 96, 4),  # 6 tiles: 4 whole, 2 in halves; nothing divides by a tile's sides
        (5, 136, 72, 8),  # 2, all in halves
        (129, 1160, 8, 7),  # 20: 14 whole and 6, which are more than half of the programs
        (260, 1280, 64, 16),  # 30, groups of 8 columns and of 2
    ],
)
def test_a_gated_product(rows, outputs, inputs, programs):  # in float16: the interpreter does not multiply bfloat16
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(size, inputs, generator=generator).half() for size in (rows, 2 * outputs))
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    result = gated_product(x, weight, programs=programs)
    torch.testing.assert_close(result.double(), F.silu(gate) * up, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "inputs", "programs"),
    [
        (5, 4, 2, 128, 64, 1),  # four whole tiles
        (200, 4, 2, 128, 64, 6),  # 8: 6 whole, 2 in halves, of a head each
        (130, 8, 4, 64, 72, 3),  # 8: 6 and 2, of two heads
        (20, 2, 2, 128, 64, 8),  # 3, all in halves
        (20, 8, 8, 32, 40, 4),  # 3
    ],
)
def test_heads_turn_and_their_keys_and_values_are_stored(rows, heads, kv_heads, dim, inputs, programs, biased):
    generator = torch.Generator().manual_seed(rows)
    outputs = (heads + 2 * kv_heads) * dim
    x, weight, bias = (
        torch.randn(shape, generator=generator).half() for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    weight /= 8
    ours, twin = twins(rows, kv_heads, dim, torch.float16)
    queries = turned_product(x, weight, bias if biased else None, ours, programs=programs)
    product = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert_turned(queries, ours, product, twin, tolerance=2e-3)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "programs"),
    [
        (128, 256, 64, 1),  # one tile
        (5, 500, 72, 8),  # 2, the second of which goes 3 columns beyond each half
        (260, 1100, 40, 7),  # 15
    ],
)
@pytest.mark.parametrize("counted", [False, True])
def test_the_largest_of_a_product(rows, outputs, inputs, programs, counted):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randint(-2, 3, (size, inputs), generator=generator).half() for size in (rows, outputs))
    x[0] = 0  # all are equal
    weight[3], weight[-1] = weight[outputs // 2], weight[outputs // 2]
    x[1:4] = 2 * weight[3]  # the first of three, of both halves
    product = x.double() @ weight.double().T
    expected = (product == product.amax(1, keepdim=True)).int().argmax(1)
    if counted:  # a third of them, to other places
        count, places = torch.tensor([rows // 3], dtype=torch.int32), torch.randperm(rows, generator=generator).int()
        out = torch.full((rows,), -1, dtype=torch.int32)
        result = largest_of_product(x, weight, count=count, places=places, out=out, programs=programs)
        assert result is out
        assert result[places[: rows // 3]].tolist() == expected[: rows // 3].tolist()
        assert (result >= 0).sum() == rows // 3
    else:
        result = largest_of_product(x, weight, programs=programs)
        assert result.dtype is torch.int32
        assert result.tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_still_has_a_column(value):
    x, weight = torch.full((3, 64), value).half(), torch.ones(300, 64).half()
    assert all(0 <= column < 300 for column in largest_of_product(x, weight).tolist())


@pytest.mark.parametrize(
    ("rows", "processors", "expected"),
    [
        (64, 132, False),  # half of each tile is padding
        (128, 132, True),  # 112 tiles in a round
        (192, 132, False),
        (256, 132, True),  # 224 in 2
        (320, 132, False),  # 336 in 3, a sixth of them padding
        (384, 132, False),  # the same, none of them
        (512, 132, True),  # 448 in 3.5
        (640, 132, True),  # 560 in 4.5
        (1280, 132, True),
        (1280, 1000, False),  # 1,120 in 1.5
    ],
)
def test_it_pays_where_few_processors_wait(rows, processors, expected, monkeypatch):
    monkeypatch.setattr("outrider_runtime.kernels.tall.processors", lambda device: processors)
    weight = torch.empty(2 * 14336, 4096, dtype=torch.bfloat16, device="meta")
    assert gating_pays(rows, weight) is expected


@pytest.mark.parametrize(
    ("rows", "outputs", "expected"),
    [
        (100, 128256, False),
        (128, 128256, True),
        (192, 128256, False),  # a quarter of the tiles is padding
        (1280, 128256, True),
        (1280, 128257, False),  # not in halves
        (1280, 20000, False),  # 790 tiles in 6 rounds, of which none is done in halves
    ],
)
def test_it_pays_for_many_logits(rows, outputs, expected, monkeypatch):
    monkeypatch.setattr("outrider_runtime.kernels.tall.processors", lambda device: 152)
    assert largest_pays(rows, torch.empty(outputs, 4096, dtype=torch.bfloat16, device="meta")) is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_for_16_bits(dtype):
    assert not gating_pays(2560, torch.empty(256, 4096, dtype=dtype))


@pytest.mark.parametrize(("outputs", "inputs"), [(132, 64), (128, 68)])
def test_rows_that_begin_anywhere_are_not_copied_by_tiles(outputs, inputs):
    assert not gating_pays(2560, torch.empty(2 * outputs, inputs, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "expected"),
    [
        (32, 8, 128, True),
        (32, 8, 64, True),
        (32, 2, 128, True),
        (33, 1, 128, False),  # keys and values would share a tile
        (36, 8, 96, False),  # a tile would end within a head
        (16, 8, 256, False),  # there is no room for what so large ones turn by
    ],
)
def test_heads_turn_where_tiles_hold_their_like(heads, kv_heads, dim, expected, monkeypatch):
    monkeypatch.setattr("outrider_runtime.kernels.tall.LEAST_USE", 0.0)
    weight = torch.empty((heads + 2 * kv_heads) * dim, 1024, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(16, kv_heads, dim, dtype=torch.bfloat16, device="meta")
    assert turning_pays(1280, weight, Turn(*5 * (keys,))) is expected
