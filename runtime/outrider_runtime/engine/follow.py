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
    """For each of a step's tokens [T] the one behind it in the text, after verification; and which of these texts end
    with: from them alone drafts go on. [E] are the feed's first requests, as many as may have tokens."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int32, of the KV; nowhere, where the text has no such token
    contexts: Tensor  # [N] int32: what the last token of each request sees, itself included
    ends: Tensor  # [E] int32: which of the [T] is the text's last; the first, where none of the request's is
    lengths: Tensor  # [E] int32: what that sees, itself included; 1, where there is none
    owners: Tensor  # [E] int64: the slot of that text; nobody's, where there is none


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
    tokens = len(positions)
    slots, behind = feed.slots[feed.owners], (positions + 1).to(torch.int32)
    lengths = state.lengths[slots]
    capacities = torch.where(behind < lengths, feed.capacities[feed.owners], 0)
    first, last = feed.query_starts[:-1], feed.query_starts[1:]
    begins = behind[first.clamp(max=tokens - 1)]
    texts = feed.slots[:-1]
    ends = first + state.lengths[texts] - 1 - begins
    there = (ends >= first) & (ends < last)
    some = min(tokens, len(texts))
    return Entries(
        state.tokens[slots, behind.clamp(max=state.width)],
        behind,
        kv_slots(state, cache, slots, behind, capacities),
        torch.where(last > first, begins + last - first, 0),
        torch.where(there, ends, 0)[:some],
        torch.where(there, state.lengths[texts], 1)[:some],
        torch.where(there, texts, state.nobody)[:some].long(),
    )


def text_ends(state: DeviceState, feed: Feed, positions: Tensor) -> Tensor:
    """[T] int64: the slot of the text that ends behind a token; nobody's, where none does."""
    slots = feed.slots[feed.owners]
    return torch.where(positions + 2 == state.lengths[slots], slots, state.nobody).long()


def entry_batch(
    state: DeviceState,
    feed: Feed,
    cache: KVCache,
    shape: AttentionShape,
    positions: Tensor,
    *,
    whole: bool,
    small: bool,
) -> tuple[Batch, Tensor, Tensor]:
    """They as a head takes them, and their `ends` and `owners`. Planned is the attention of the `ends`; or, for the
    `whole`, of all tokens. `small`: no request brings more than a few."""
    found = entries(state, feed, cache, positions)
    count = len(found.ends)
    plan = attention_plan(
        feed.query_starts if whole else state.counting[: count + 1],
        found.contexts if whole else found.lengths,
        feed.slots[:-1] if whole else feed.slots[:count],
        state.block_tables,
        tokens=len(positions) if whole else count,
        block_size=cache.block_size,
        dim=cache.dim,
        shape=shape,
        small=small or not whole,
        narrow=not whole,
    )
    return Batch(found.token_ids, found.positions, found.slots, plan), found.ends, found.owners
