"""Merged projections give their parts the same whichever way they are computed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from outrider_runtime.layers import linear
from outrider_runtime.layers.linear import MergedLinear
from outrider_runtime.layers.norm import RMSNorm
from outrider_runtime.layers.rope import Turn, split_qkv, turn_and_store

TOKENS, DIM = 9, 4
_product = linear.linear


def turn() -> Turn:
    angles = torch.linspace(0, 3, TOKENS).view(TOKENS, 1, 1).expand(-1, -1, DIM)
    keys, values = torch.zeros(2, TOKENS, 2, DIM)
    return Turn(angles.cos(), angles.sin(), keys, values, torch.arange(TOKENS))


@pytest.mark.parametrize("spared", [TOKENS - 3, TOKENS - 2], ids=["apart", "merged"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_normed", [False, True])
def test_queries_of_some_rows_are_theirs_whether_the_others_are_computed_or_not(
    monkeypatch, spared, bias, normed, head_normed
):
    torch.manual_seed(0)
    layer = MergedLinear(16, {"q": 4 * DIM, "k": 2 * DIM, "v": 2 * DIM}, bias, torch.float32, "cpu")
    norms = [RMSNorm(size, 1e-6, torch.float32, "cpu") for size in (16, DIM, DIM)]
    for parameter in (*layer.parameters(), *(norm.weight for norm in norms)):
        parameter.normal_()
    norm, head_norms = norms[0] if normed else None, (norms[1], norms[2]) if head_normed else None
    x, rows, ours, wanted = torch.randn(TOKENS, 16), torch.tensor([8, 0, 5]), turn(), turn()

    computed = []
    monkeypatch.setattr(linear, "SPARED_QUERIES", spared)
    monkeypatch.setattr(linear, "linear", lambda x, *given: computed.append(x) or _product(x, *given))
    queries = layer.turned(x, norm, ours, head_norms, rows)

    qkv = F.linear(x if norm is None else norm(x), layer.weight, layer.bias)
    torch.testing.assert_close(queries, turn_and_store(*split_qkv(qkv, wanted), wanted, head_norms)[rows])
    torch.testing.assert_close((ours.keys, ours.values), (wanted.keys, wanted.values))
    assert [len(each) for each in computed] == ([3, TOKENS] if spared == TOKENS - 3 else [TOKENS])
