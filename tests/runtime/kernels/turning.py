"""What heads turn by and where their keys and values go, for kernels that do both behind a product of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider_runtime.layers.rope import Turn, split_qkv, turn_and_store


def twins(rows: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Turn, Turn]:
    """The same turn in `dtype` and in float64: by any angles, some slots negative, into arrays full of sevens."""
    generator = torch.Generator().manual_seed(rows)
    angles = 3 * torch.randn(rows, 1, dim // 2, generator=generator)
    cosines, sines = angles.cos(), angles.sin()
    slots = torch.randperm(rows + 5, generator=generator)[:rows]
    slots[1::4] = -1

    def turn(dtype: torch.dtype) -> Turn:
        keys, values = torch.full((2, rows + 5, kv_heads, dim), 7.0, dtype=dtype)
        return Turn(torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1), keys, values, slots)

    return turn(dtype), turn(torch.float64)


def assert_turned(queries: Tensor, ours: Turn, product: Tensor, twin: Turn, tolerance: float) -> None:
    """That queries, keys and values are what the float64 `product` makes of the twin."""
    turned = turn_and_store(*split_qkv(product, twin), twin, None)
    for result, want in zip((queries, ours.keys, ours.values), (turned, twin.keys, twin.values), strict=True):
        assert result.dtype == ours.keys.dtype
        torch.testing.assert_close(result.double(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())
