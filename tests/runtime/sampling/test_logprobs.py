"""Log probabilities are the model's own, whatever the request's temperature makes of them."""

from __future__ import annotations

import pytest
import torch

from outrider_runtime.sampling.logprobs import logprobs


@pytest.mark.parametrize("at_once", [50, 1 << 23])
@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_drawn_and_the_likeliest_are_told(dtype, count, at_once, monkeypatch):
    monkeypatch.setattr("outrider_runtime.sampling.logprobs.LOGITS_AT_ONCE", at_once)
    logits = torch.randn(7, 20, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    tokens = torch.arange(7, dtype=torch.int32)
    told = logprobs(logits, tokens, count)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(told.chosen.double(), expected.diagonal(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(told.top.double(), expected.topk(count).values, rtol=1e-5, atol=1e-5)
    assert told.top_ids.dtype == torch.int32
    torch.testing.assert_close(expected.gather(1, told.top_ids.long()), expected.topk(count).values)
