"""Rotation, norms of heads and the writing of KV are those of the torch twin."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from outrider_runtime.kernels.rope import rotation, turn_and_store
from outrider_runtime.layers.rope import RotaryEmbedding, Turn, rotate, split_qkv
from outrider_runtime.models.config import ModelConfig

TOKENS, CACHE = 4, 10
POSITIONS = torch.tensor([0, 17, 4000, 131071])


def rope(dim: int, **scaling) -> RotaryEmbedding:
    config = ModelConfig("LlamaForCausalLM", 8, dim, dim, 1, 1, 1, dim, 512, rope_scaling=scaling or None)
    return RotaryEmbedding(config, "cpu")


def turns(embedding: RotaryEmbedding) -> tuple[torch.Tensor, torch.Tensor]:
    return rotation(POSITIONS, embedding.frequencies, embedding.magnitude)


@pytest.mark.parametrize("dim", [8, 24, 64])
def test_cosines_and_sines_are_the_twins(dim):
    embedding = rope(dim, rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
    assert embedding.magnitude != 1
    for ours, twins in zip(turns(embedding), embedding(POSITIONS, torch.float32), strict=True):
        torch.testing.assert_close(ours, twins, rtol=1e-5, atol=1e-5)


def random_norm(dim: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(dim, generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "normed", "dtype"),
    [
        (4, 2, 8, False, torch.float32),
        (6, 2, 24, True, torch.float32),
        (6, 2, 24, True, torch.bfloat16),
        (3, 1, 40, False, torch.bfloat16),
        (3, 1, 40, True, torch.float32),
    ],
)
@pytest.mark.parametrize("rows", [None, [2, 0, 3]], ids=["all queries", "some queries"])
def test_queries_turn_and_keys_and_values_are_stored(heads, kv_heads, dim, normed, dtype, rows):
    generator = torch.Generator().manual_seed(heads * dim)
    embedding = rope(dim)
    qkv = torch.randn(TOKENS, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    norms = (random_norm(dim, dtype, generator), random_norm(dim, dtype, generator)) if normed else None
    keys, values = torch.full((2, CACHE, kv_heads, dim), 7.0, dtype=dtype)
    slots = torch.tensor([3, 0, -1, 9])
    turn = Turn(*turns(embedding), keys, values, slots)
    queries, kv = split_qkv(qkv, turn)
    if rows is None:
        turned = turn_and_store(queries, kv, turn, norms=norms, eps=1e-6)
    else:
        turned = turn_and_store(queries[rows].contiguous(), kv, turn, torch.tensor(rows), norms=norms, eps=1e-6)

    parts = qkv.double().unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    angles = [part.double() for part in embedding(POSITIONS, torch.float32)]
    for part, norm, result in zip(parts[:2], norms or (None, None), (turned, keys[slots]), strict=True):
        wide = part if norm is None else F.rms_norm(part, norm.shape, norm.double(), 1e-6)
        expected = rotate(wide, *angles)
        if result is turned:
            kept = slice(None)
            expected = expected if rows is None else expected[rows]
        else:
            kept = slots >= 0
        tolerance = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(result[kept].double(), expected[kept], rtol=tolerance, atol=tolerance)
    assert torch.equal(values[slots[slots >= 0]], parts[2][slots >= 0].to(dtype))
    untouched = [slot for slot in range(CACHE) if slot not in slots.tolist()]
    assert (keys[untouched] == 7).all()
    assert (values[untouched] == 7).all()
