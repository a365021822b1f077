"""The device's part of a step around the models: what the tokens are, and which of them stand.

All of it is tensor arithmetic of fixed shapes without a look back from the host, so that CUDA graphs can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.attention import AttentionShape
from outrider_runtime.layers.batch import Batch, attention_plan
from outrider_runtime.sampling.noise import random_words
from outrider_runtime.sampling.table import SamplingTable, Settings


def update_tables(state: DeviceState, feed: Feed) -> None:
    """Take note of the blocks that requests have got. Doing it twice does no harm."""
    state.block_tables[feed.update_slots, feed.update_indices] = feed.update_blocks


def gather_batch(state: DeviceState, feed: Feed, cache: KVCache, shape: AttentionShape, *, small: bool) -> Batch:
    """The feed's tokens as a model takes them, drafts included. `small`: no request brings more than a few."""
    slots, lengths = feed.slots, state.lengths[feed.slots]
    starts = torch.where(feed.starts < 0, lengths - 1, feed.starts)
    owners = feed.owners
    offsets = torch.arange(len(owners), device=owners.device, dtype=torch.int32) - feed.query_starts[owners]
    positions = starts[owners] + offsets
    owning = slots[owners]
    counted = (feed.query_starts.diff() + starts[:-1]).to(torch.int32)
    return Batch(
        token_ids=state.tokens[owning, positions.clamp(max=state.width)],
        positions=positions,
        slots=kv_slots(state, cache, owning, positions, feed.capacities[owners]),
        attention=attention_plan(
            feed.query_starts,
            counted,
            slots[:-1],
            state.block_tables,
            tokens=len(owners),
            block_size=cache.block_size,
            dim=cache.dim,
            shape=shape,
            small=small,
        ),
    )


def kv_slots(state: DeviceState, cache: KVCache, owners: Tensor, positions: Tensor, capacities: Tensor) -> Tensor:
    """Where the KV of `positions` [tokens] of the texts in the slots `owners` [tokens] lies; what the request has no
    block for goes nowhere."""
    index = torch.div(positions, cache.block_size, rounding_mode="floor").clamp(0, state.block_tables.shape[1] - 1)
    slots = state.block_tables[owners, index] * cache.block_size + positions % cache.block_size
    return torch.where((positions >= 0) & (positions < capacities), slots, cache.nowhere)


def commit(state: DeviceState, feed: Feed, sampled: Tensor, width: int, stands: Tensor | None = None) -> Tensor:
    """Verification: append to each text the target's tokens as far as the drafts equal them, and the one behind.

    `sampled` is [R], the target's token of each row; `width` is the longest draft. Returns [N, 1 + width + 1]: how
    many tokens each request has got (0 where none was sampled), and the target's tokens. `stands`, [N + 1], replaces
    the comparison by a given number of drafts (benchmarks only).
    """
    turns = torch.arange(width + 1, device=sampled.device, dtype=torch.int32)
    rows = (feed.first_rows.clamp(min=0).unsqueeze(1) + turns).clamp(max=len(sampled) - 1)
    target = sampled[rows].to(torch.int32)  # [N + 1, width + 1]
    lengths = state.lengths[feed.slots]
    columns = (lengths.unsqueeze(1) + turns).clamp(max=state.width)
    drafts = state.tokens[feed.slots.unsqueeze(1), columns]
    equal = (drafts == target) & (turns < feed.drafts.unsqueeze(1))
    accepted = equal.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32) if stands is None else stands
    # A row whose own KV has no place sees none: what it says does not count.
    accepted = torch.minimum(torch.minimum(accepted, feed.drafts), (feed.capacities - lengths).clamp(min=0))
    emitted = torch.where(feed.first_rows < 0, 0, accepted + 1)
    state.tokens[feed.slots.unsqueeze(1), torch.where(turns < emitted.unsqueeze(1), columns, state.width)] = target
    state.lengths[feed.slots] = torch.where(feed.slots == state.nobody, 1, lengths + emitted).clamp(max=state.width)
    return torch.cat((emitted.unsqueeze(1), target), dim=1)[:-1]


def stands_by_lot(state: DeviceState, feed: Feed, table: SamplingTable, accepted_length: float) -> Tensor:
    """For benchmarks: how many drafts stand, [N + 1], so that a step yields `accepted_length` tokens on average."""
    whole = int(accepted_length) - 1
    lots = random_words(Settings(table.rows[feed.slots]).seeds, state.lengths[feed.slots].long(), 1)[:, 0]
    return whole + (lots.to(torch.float32) * 2.0**-32 < accepted_length - int(accepted_length)).to(torch.int32)
