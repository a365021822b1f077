"""What goes with a step's tokens once they are verified is what the torch beside the kernels says."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from tests.runtime.kernels.test_step import SIZE, Rig
from torch.nn import functional as F

from outrider_runtime.engine import device_step, follow
from outrider_runtime.kernels.follow import entries
from outrider_runtime.kernels.pair import pair


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_entries_are_those_of_the_definition(seed, padded):
    rig = Rig(seed, padded=padded)
    state, feed = rig.states[0], rig.feed
    _, positions, _, _ = device_step.gather(state, feed, rig.cache)
    state.lengths[feed.slots[:-1]] += torch.arange(len(feed.slots) - 1, dtype=torch.int32) % 3  # verified
    state.lengths[state.nobody] = 1
    expected = follow.entries(state, feed, rig.cache, positions)
    found = entries(
        state.tokens,
        state.lengths,
        state.block_tables,
        feed.slots,
        feed.capacities,
        feed.query_starts,
        feed.owners,
        positions,
        nobody=state.nobody,
        block_size=SIZE,
        nowhere=rig.cache.nowhere,
    )
    for field, one in zip(fields(expected), found, strict=True):
        assert one.tolist() == getattr(expected, field.name).tolist(), field.name
    ends = expected.owners != state.nobody
    of_tokens = follow.text_ends(state, feed, positions)
    assert sorted(expected.ends[ends].tolist()) == (of_tokens != state.nobody).nonzero()[:, 0].tolist()
    assert of_tokens[expected.ends[ends]].tolist() == expected.owners[ends].tolist()
    assert expected.positions[expected.ends[ends]].tolist() == (expected.lengths[ends] - 1).tolist()


@pytest.mark.parametrize("normed", [True, False])
def test_pairs_are_an_embedding_and_a_state(normed):
    embeddings, states = torch.randn(7, 20), torch.randn(5, 20)
    token_ids = torch.tensor([3, 0, 6, 9, 3], dtype=torch.int32)  # one that the head does not know
    norms = (torch.rand(20), torch.rand(20))
    halves = embeddings[token_ids.long().clamp(max=6)], states
    if normed:
        halves = tuple(F.rms_norm(half, (20,), norm, 1e-5) for half, norm in zip(halves, norms, strict=True))
    found = pair(embeddings, token_ids, states, norms=norms if normed else None, eps=1e-5)
    torch.testing.assert_close(found, torch.cat(halves, dim=1), rtol=1e-5, atol=1e-6)
