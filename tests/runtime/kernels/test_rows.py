"""Rows are taken as torch takes them."""

from __future__ import annotations

import pytest
import torch

from outrider_runtime.kernels import rows


@pytest.mark.parametrize("size", [8, 96, 1300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_rows_of_a_part_of_a_matrix(size, dtype):
    source = torch.randn(9, size + 5, generator=torch.Generator().manual_seed(0)).bfloat16()[:, :size]
    indices = torch.tensor([8, 0, 3, 3, 5], dtype=dtype)
    assert torch.equal(rows.take_rows(source, indices), source[indices])
