"""The gated product is the library's two products with torch's SiLU between them, whole tiles and halves alike."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from outrider_runtime.kernels.gated import gated_product, pays


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
    monkeypatch.setattr("outrider_runtime.kernels.gated.processors", lambda device: processors)
    x, weight = (torch.empty(size, 4096, dtype=torch.bfloat16, device="meta") for size in (rows, 2 * 14336))
    assert pays(x, weight) is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_for_16_bits(dtype):
    assert not pays(torch.empty(2560, 4096, dtype=dtype), torch.empty(256, 4096, dtype=dtype))


@pytest.mark.parametrize(("outputs", "inputs"), [(132, 64), (128, 68)])
def test_rows_that_begin_anywhere_are_not_copied_by_tiles(outputs, inputs):
    x, weight = (torch.empty(size, inputs, dtype=torch.bfloat16) for size in (2560, 2 * outputs))
    assert not pays(x, weight)
