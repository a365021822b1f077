"""What trees change of a step's tokens, found on the device: a token's KV lies where its number says, but its position
in the text is as deep as its branch, and of its tree it sees its branch alone.

Beside device_step.py, whose chains know nothing of this; on CUDA a few kernels more (kernels/tree.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider_runtime.engine.device_step import gathered, kv_slots, place
from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.attention import AttentionShape
from outrider_runtime.layers.batch import Batch, attention_plan
from outrider_runtime.speculation.expansion import Frontier


def place_trees(state: DeviceState, slots: Tensor, first: Tensor, drafts: Tensor, parents: Tensor) -> None:
    """Write drafts and their parents, [rows, drafts] int32 each, behind the texts in `slots` [rows], from position
    `first` [rows] on."""
    place(state, slots, first, drafts)
    state.parents[slots, : parents.shape[1]] = parents


def gather_tree_batch(
    state: DeviceState, feed: Feed, cache: KVCache, shape: AttentionShape, places: Tensor, *, small: bool, depth: int
) -> Batch:
    """device_step.gather_batch() of a feed whose drafts form trees, none deeper than `depth`. `places` [T] int32 become
    the positions of the tokens' KV, which after verification are those of the tokens that stand."""
    token_ids, _, slots, contexts = gathered(state, feed, cache, places)
    positions, ancestors = branches(state, feed, places, depth)
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
        ancestors=ancestors,
    )
    return Batch(token_ids, positions, slots, plan)


def branches(state: DeviceState, feed: Feed, positions: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """From where the feed's tokens have their KV, [T], to their positions in the texts, [T] int32, and which of their
    request's own tokens they see, [T] int64, a bit each. No draft lies deeper than `depth`.

    Of a request without drafts each token sees those up to itself, which is -1.
    """
    if positions.is_cuda:
        from outrider_runtime.kernels import tree

        return tree.branches(state.parents, feed.slots, feed.drafts, feed.query_starts, feed.owners, positions, depth)
    slots, in_tree = feed.slots[feed.owners], feed.drafts[feed.owners] > 0
    own = torch.arange(len(positions), device=positions.device, dtype=torch.int32) - feed.query_starts[feed.owners]
    node = torch.where(in_tree, own, -1)
    ancestors = torch.zeros(len(positions), dtype=torch.int64, device=positions.device)
    count = torch.zeros_like(own)
    for _ in range(depth + 1):
        ancestors |= torch.where(node >= 0, 1 << node.clamp(min=0).long(), 0)
        count += node >= 0
        node = torch.where(node > 0, state.parents[slots, (node - 1).clamp(min=0)], -1)
    return torch.where(in_tree, positions - own + count - 1, positions), torch.where(in_tree, ancestors, -1)


def frontier_batch(
    state: DeviceState,
    feed: Feed,
    cache: KVCache,
    shape: AttentionShape,
    ends: Tensor,
    frontier: Frontier,
    turn: int,
) -> tuple[Batch, Tensor]:
    """For the feed's first requests, whose texts stand up to `ends` [requests]: the `turn`-th frontier, from 0 on, as a
    draft with KV of its own reads it; [requests * top_k] tokens. Also their positions in the texts.

    What the feed says drafts nothing leaves no KV.
    """
    requests, top_k = frontier.tokens.shape
    slots, capacities, drafts = feed.slots[:requests], feed.capacities[:requests], feed.drafts[:requests]
    if state.tokens.is_cuda:
        from outrider_runtime.kernels import tree

        positions, places, contexts = tree.frontier(
            ends,
            state.block_tables,
            slots,
            capacities,
            drafts,
            top_k,
            turn,
            block_size=cache.block_size,
            nowhere=cache.nowhere,
        )
    else:
        positions, places, contexts = frontier_places(state, cache, slots, capacities, drafts, ends, top_k, turn)
    plan = attention_plan(
        torch.arange(0, (requests + 1) * top_k, top_k, device=ends.device, dtype=torch.int32),
        contexts,
        slots,
        state.block_tables,
        tokens=requests * top_k,
        block_size=cache.block_size,
        dim=cache.dim,
        shape=shape,
        small=True,
        ancestors=frontier.ancestors.flatten(),
        before=turn * top_k,
    )
    return Batch(frontier.tokens.flatten(), positions, places, plan), positions


def frontier_places(
    state: DeviceState,
    cache: KVCache,
    slots: Tensor,
    capacities: Tensor,
    drafts: Tensor,
    ends: Tensor,
    top_k: int,
    turn: int,
) -> tuple[Tensor, Tensor, Tensor]:
    ranks = torch.arange(top_k, device=ends.device, dtype=torch.int32)
    places = (ends.unsqueeze(1) + turn * top_k + ranks).flatten()
    limits = torch.where(drafts > 0, capacities, 0).repeat_interleave(top_k)
    own_slots = kv_slots(state, cache, slots.repeat_interleave(top_k), places, limits)
    return (ends + turn).repeat_interleave(top_k), own_slots, ends + (turn + 1) * top_k
