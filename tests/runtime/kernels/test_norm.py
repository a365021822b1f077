"""The norm is torch's, computed in float32."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from outrider_runtime.kernels.norm import rms_norm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (5, 96), (17, 128)])
def test_a_norm_of_each_row(rows, size, dtype, tolerance):
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, size, generator=generator) * 100).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, rtol=tolerance, atol=tolerance)


def test_a_row_of_zeros_stays_zeros():
    assert not rms_norm(torch.zeros(2, 16), torch.ones(16), 1e-6).any()
