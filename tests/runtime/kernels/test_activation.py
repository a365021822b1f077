"""The gate is torch's SiLU, of the first half of the columns."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from outrider_runtime.kernels.activation import silu_gate


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(("rows", "size"), [(1, 5), (2, 1500)])
def test_a_gated_row(rows, size, dtype, tolerance):
    gate_up = (torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size)) * 5).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    result = silu_gate(gate_up)
    torch.testing.assert_close(result.double(), F.silu(gate) * up, rtol=tolerance, atol=tolerance)
