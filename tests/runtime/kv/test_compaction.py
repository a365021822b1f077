"""Behind a verified tree, what stands lies as if it had been drafted alone."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider_runtime.kv.cache import KVCache
from outrider_runtime.kv.compaction import Path, compact_kv, compact_rows
from outrider_runtime.models.config import model_config

LAYERS, BLOCK, DEPTH = 2, 4, 5
CONFIG = model_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 3,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    }
)
paths = st.lists(st.sets(st.integers(1, 16), max_size=DEPTH).map(sorted), min_size=1, max_size=4)


def path_of(numbers: list[list[int]], ends: list[int]) -> Path:
    rows = [[*own, *[-1] * (DEPTH - len(own))] for own in numbers]
    return Path(torch.tensor(ends, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32))


@given(numbers=paths, seed=st.integers(0, 99))
def test_the_kv_of_what_stands_is_moved_in_all_layers(numbers, seed):
    lots = random.Random(seed)
    cache = KVCache(CONFIG, 40, BLOCK, torch.float32, "cpu")
    cache.arrays.copy_(torch.arange(cache.arrays.numel()).view_as(cache.arrays))
    before = cache.arrays.clone()
    order = lots.sample(range(40), 40)
    tables = torch.tensor([order[row * 8 : row * 8 + 8] for row in range(5)], dtype=torch.int32)
    slots = lots.sample(range(5), len(numbers))
    ends = [lots.randint(1, 15) for _ in numbers]
    compact_kv(cache, tables, torch.tensor(slots, dtype=torch.int32), path_of(numbers, ends))

    def place(slot: int, position: int) -> int:
        return int(tables[slot, position // BLOCK]) * BLOCK + position % BLOCK

    for slot, end, own in zip(slots, ends, numbers, strict=True):
        for turn, number in enumerate(own):
            source, target = place(slot, end - 1 + number), place(slot, end + turn)
            assert torch.equal(cache.arrays[:, :, target], before[:, :, source])
            before[:, :, target] = cache.arrays[:, :, target]
    assert torch.equal(cache.arrays, before)  # and nothing else has changed


@given(numbers=paths, seed=st.integers(0, 99))
def test_rows_move_with_it(numbers, seed):
    lots = random.Random(seed)
    rows = torch.arange(3 * 17 * len(numbers)).view(-1, 3)
    firsts = [-1 if lots.random() < 0.2 else 17 * request for request in range(len(numbers))]
    expected = rows.clone()
    for first, own in zip(firsts, numbers, strict=True):
        if first >= 0:
            for turn, number in enumerate(own, start=1):
                expected[first + turn] = rows[first + number]
    compact_rows(rows, torch.tensor(firsts, dtype=torch.int32), path_of(numbers, [9] * len(numbers)))
    assert torch.equal(rows, expected)
