"""A step's tokens once more, for what drafts from the target's hidden states, when it is known which of them stand.

The hidden state of a position goes with the token behind it: that is an entry of an EAGLE head, at that token's
position. Of fixed shapes and without a look from the host, as device_step.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_runtime.engine.device_step import kv_slots
from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.attention import AttentionShape
from outrider_runtime.layers.batch import Batch, attention_plan


@dataclass(frozen=True, slots=True)
class Entries:
    """For each of a step's tokens [T] the one behind it in the text, after verification."""

    token_ids: Tensor  # int32
    positions: Tensor  # int32
    slots: Tensor  # int32, of the KV; nowhere, where the text has no such token
    contexts: Tensor  # [N] int32: what the last token of each request sees, itself included
    owners: Tensor  # int64: the slot of the text whose last token it is; for others nobody's


def entries(state: DeviceState, feed: Feed, cache: KVCache, positions: Tensor) -> Entries:
    """`positions` [T] are those of the feed's tokens when they were computed: the texts have grown since."""
    if state.tokens.is_cuda:
        from outrider_runtime.kernels.follow import entries as kernel

        return Entries(
            *kernel(
                state.tokens,
                state.lengths,
                state.block_tables,
                feed.slots,
                feed.capacities,
                feed.query_starts,
                feed.owners,
                positions,
                nobody=state.nobody,
                block_size=cache.block_size,
                nowhere=cache.nowhere,
            )
        )
    slots, behind = feed.slots[feed.owners], (positions + 1).to(torch.int32)
    lengths = state.lengths[slots]
    capacities = torch.where(behind < lengths, feed.capacities[feed.owners], 0)
    first, last = feed.query_starts[:-1], feed.query_starts[1:]
    ends = behind[(last - 1).clamp(min=0)]
    return Entries(
        state.tokens[slots, behind.clamp(max=state.width)],
        behind,
        kv_slots(state, cache, slots, behind, capacities),
        torch.where(last > first, ends + 1, 0),
        text_ends(state, feed, positions),
    )


def text_ends(state: DeviceState, feed: Feed, positions: Tensor) -> Tensor:
    """Of Entries, the `owners` alone."""
    slots = feed.slots[feed.owners]
    return torch.where(positions + 2 == state.lengths[slots], slots, state.nobody).long()


def entry_batch(
    state: DeviceState, feed: Feed, cache: KVCache, shape: AttentionShape, positions: Tensor, *, small: bool
) -> tuple[Batch, Tensor]:
    """They as a head takes them, and their `owners`. `small`: no request brings more than a few."""
    found = entries(state, feed, cache, positions)
    plan = attention_plan(
        feed.query_starts,
        found.contexts,
        feed.slots[:-1],
        state.block_tables,
        tokens=len(positions),
        block_size=cache.block_size,
        dim=cache.dim,
        shape=shape,
        small=small,
    )
    return Batch(found.token_ids, found.positions, found.slots, plan), found.owners
