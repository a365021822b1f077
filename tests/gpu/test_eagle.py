"""On a CUDA device an EAGLE head leaves the same states and KV, and drafts the same tokens, as on the CPU."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.marks import ON_A_GPU
from tests.runtime.heads import eagle_draft
from tests.runtime.tiny import ours, reference_model
from tests.runtime.verified import BLOCKS, ENDING, SIZE, verified_step

from outrider_runtime.kv.cache import KVCache
from outrider_runtime.sampling.table import Mode, SamplingTable
from outrider_runtime.speculation.eagle import Eagle

pytestmark = ON_A_GPU


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def extended(version, tokens, device, **more):
    """What a head has of a step with random hidden states, and texts with drafts behind them."""
    generator = torch.Generator().manual_seed(5)
    model = ours(reference_model(), device=device)
    head = eagle_draft(version, model, **more)
    step = verified_step(tokens, device)
    cache = KVCache(head.config, BLOCKS, SIZE, torch.float32, device)
    eagle = Eagle(head, model, cache, step.state, SamplingTable(step.state.tokens), tokens)
    hidden = torch.randn(tokens, model.config.hidden_size, generator=generator)
    if model.taps is not None:
        model.taps.copy_(torch.randn(model.taps.shape, generator=generator))
    eagle.extend(step.feed, hidden.to(device), step.positions, small=True)
    states = eagle._states[ENDING].cpu()
    eagle.draft(step.feed, len(ENDING), 3, Mode.GREEDY)
    return states, cache.arrays[:, :, : cache.nowhere].cpu(), step.state.tokens[ENDING].tolist()


@pytest.mark.parametrize("tokens", [24, 48], ids=["few rows", "more"])  # our own products, and the library's
@pytest.mark.parametrize("more", [{}, {"layers": 2}, {"norm_before_residual": True}], ids=str)
@pytest.mark.parametrize("version", [1, 3])
def test_a_verified_step_leaves_states_kv_and_drafts_as_on_the_cpu(version, more, tokens):
    states, kv, texts = extended(version, tokens, "cuda", **more)
    expected_states, expected_kv, expected_texts = extended(version, tokens, "cpu", **more)
    torch.testing.assert_close(states, expected_states, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(kv, expected_kv, rtol=1e-3, atol=1e-3)
    assert texts == expected_texts
