"""What a step's tokens are, found on the device; which of them stand is speculation/verify.py's.

All of it is of fixed shapes and without a look back from the host, so that CUDA graphs can hold it. On CUDA it is a
few kernels (kernels/step.py); the torch beside each call says what they do, and does it elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.attention import AttentionPlan, AttentionShape
from outrider_runtime.layers.batch import Batch, attention_plan, decode_plans


def update_tables(state: DeviceState, feed: Feed) -> None:
    """Take note of the blocks that requests have got. Doing it twice does no harm."""
    if state.tokens.is_cuda:
        from outrider_runtime.kernels import step

        step.update_tables(state.block_tables, feed.update_slots, feed.update_indices, feed.update_blocks)
    else:
        state.block_tables[feed.update_slots, feed.update_indices] = feed.update_blocks


def gather_batch(
    state: DeviceState,
    feed: Feed,
    cache: KVCache,
    shape: AttentionShape,
    places: Tensor | None = None,
    *,
    small: bool,
    narrow: bool = False,
) -> Batch:
    """The feed's tokens as a model takes them, drafts included. `places` [T] int32 become their positions. `small`: no
    request brings more than a few; `narrow`: not more than two."""
    token_ids, positions, slots, contexts = gathered(state, feed, cache, places)
    plan = attention_plan(
        feed.query_starts,
        contexts,
        feed.slots[:-1],
        state.block_tables,
        tokens=len(token_ids),
        block_size=cache.block_size,
        dim=cache.dim,
        shape=shape,
        small=small,
        narrow=narrow,
    )
    return Batch(token_ids, positions, slots, plan)


def gathered(
    state: DeviceState, feed: Feed, cache: KVCache, places: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, positions and KV slots, [T] each, and the contexts of the N requests, int32 all. The positions are
    written to `places`, if there are any."""
    if not state.tokens.is_cuda:
        token_ids, positions, slots, contexts = gather(state, feed, cache)
        return token_ids, positions if places is None else places.copy_(positions), slots, contexts
    from outrider_runtime.kernels import step

    return step.gather(
        state.tokens,
        state.lengths,
        state.block_tables,
        feed.slots,
        feed.starts,
        feed.capacities,
        feed.written,
        feed.query_starts,
        feed.owners,
        places,
        block_size=cache.block_size,
        nowhere=cache.nowhere,
    )


def gather(state: DeviceState, feed: Feed, cache: KVCache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    starts = torch.where(feed.starts < 0, state.lengths[feed.slots] - 1, feed.starts)
    owners, owning = feed.owners, feed.slots[feed.owners]
    offsets = torch.arange(len(owners), device=owners.device, dtype=torch.int32) - feed.query_starts[owners]
    positions = starts[owners] + offsets
    capacities = torch.where(positions < feed.written[owners], 0, feed.capacities[owners])
    return (
        state.tokens[owning, positions.clamp(max=state.width)],
        positions,
        kv_slots(state, cache, owning, positions, capacities),
        (feed.query_starts.diff() + starts[:-1]).to(torch.int32),
    )


def drawing(feed: Feed, owners: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Of the feed's sampled rows: the slots of the texts, and how many tokens stand before what is drawn, [R] int32
    each. `owners` and `positions` are those of at least the step's tokens."""
    if owners.is_cuda:
        from outrider_runtime.kernels import step

        return step.drawing(feed.slots, owners, feed.rows, positions)
    return feed.slots[owners[feed.rows]], positions[feed.rows] + 1


@dataclass(frozen=True, slots=True)
class Course:
    """All that is known of a draft loop before it draws anything: every turn but the last is followed by a forward over
    what it drew, one token for each request."""

    positions: Tensor  # [turns, requests] int32, of what a turn draws: its text's end by then
    slots: Tensor  # [turns, requests] int32, of the KV of that; nowhere, where the feed says it drafts nothing
    plans: list[AttentionPlan]  # of the forwards

    def batch(self, turn: int, drawn: Tensor) -> Batch:
        """What the turn drew, [requests]."""
        return Batch(drawn, self.positions[turn], self.slots[turn], self.plans[turn])


def draft_course(
    state: DeviceState, feed: Feed, cache: KVCache, shape: AttentionShape, requests: int, turns: int
) -> Course:
    """Of the feed's first requests."""
    slots, capacities, drafts = feed.slots[:requests], feed.capacities[:requests], feed.drafts[:requests]
    if state.tokens.is_cuda:
        from outrider_runtime.kernels import step

        positions, places = step.drafts_ahead(
            state.lengths,
            state.block_tables,
            slots,
            capacities,
            drafts,
            turns,
            block_size=cache.block_size,
            nowhere=cache.nowhere,
        )
    else:
        positions, places = drafts_ahead(state, cache, slots, capacities, drafts, turns)
    plans = decode_plans(
        state.counting[: requests + 1],
        positions[1:],  # the contexts of a forward: all up to where the next turn draws
        slots,
        state.block_tables,
        block_size=cache.block_size,
        dim=cache.dim,
        shape=shape,
    )
    return Course(positions, places, plans)


def drafts_ahead(
    state: DeviceState, cache: KVCache, slots: Tensor, capacities: Tensor, drafts: Tensor, turns: int
) -> tuple[Tensor, Tensor]:
    positions = state.lengths[slots] + torch.arange(turns, device=slots.device, dtype=torch.int32).unsqueeze(1)
    limits = torch.where(drafts > 0, capacities, 0)
    return positions, kv_slots(state, cache, slots.expand_as(positions), positions, limits)


def tail_batch(
    state: DeviceState, feed: Feed, cache: KVCache, shape: AttentionShape, ends: Tensor, count: int
) -> Batch:
    """For the feed's first requests, whose texts stand up to `ends` [requests]: the last `count` tokens of each. What
    the feed says drafts nothing leaves no KV."""
    requests = len(ends)
    slots, capacities, drafts = feed.slots[:requests], feed.capacities[:requests], feed.drafts[:requests]
    if state.tokens.is_cuda:
        from outrider_runtime.kernels import step

        token_ids, positions, places, query_starts = step.tails(
            state.tokens,
            ends,
            state.block_tables,
            slots,
            capacities,
            drafts,
            count,
            block_size=cache.block_size,
            nowhere=cache.nowhere,
        )
    else:
        token_ids, positions, places, query_starts = tails(state, cache, slots, capacities, drafts, ends, count)
    plan = attention_plan(
        query_starts,
        ends,
        slots,
        state.block_tables,
        tokens=requests * count,
        block_size=cache.block_size,
        dim=cache.dim,
        shape=shape,
        small=True,
        narrow=count <= 2,
    )
    return Batch(token_ids, positions, places, plan)


def tails(
    state: DeviceState,
    cache: KVCache,
    slots: Tensor,
    capacities: Tensor,
    drafts: Tensor,
    ends: Tensor,
    count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    offsets = torch.arange(-count, 0, device=slots.device, dtype=torch.int32)
    positions = (ends.unsqueeze(1) + offsets).flatten()  # -1 where the text is a single token
    owners, limits = slots.repeat_interleave(count), torch.where(drafts > 0, capacities, 0).repeat_interleave(count)
    token_ids = state.tokens[owners, positions.clamp(0, state.width)]
    query_starts = torch.arange(0, len(owners) + 1, count, device=slots.device, dtype=torch.int32)
    return token_ids, positions, kv_slots(state, cache, owners, positions, limits), query_starts


def kv_slots(state: DeviceState, cache: KVCache, owners: Tensor, positions: Tensor, capacities: Tensor) -> Tensor:
    """Where the KV of `positions` of the texts in the slots `owners` lies, of any one shape; what the request has no
    block for goes nowhere."""
    index = torch.div(positions, cache.block_size, rounding_mode="floor").clamp(0, state.block_tables.shape[1] - 1)
    slots = state.block_tables[owners, index] * cache.block_size + positions % cache.block_size
    return torch.where((positions >= 0) & (positions < capacities), slots, cache.nowhere)


def place(state: DeviceState, slots: Tensor, first: Tensor, drafts: Tensor) -> None:
    """Write drafts, [rows, k], behind the texts in `slots` [rows], from position `first` [rows] on."""
    if state.tokens.is_cuda:
        from outrider_runtime.kernels import step

        step.place(state.tokens, slots, first, drafts)
    else:
        columns = first.unsqueeze(1) + torch.arange(drafts.shape[1], device=drafts.device, dtype=first.dtype)
        state.tokens[slots.unsqueeze(1), columns.clamp(max=state.width)] = drafts.to(torch.int32)
