"""The one verification rule: a draft stands while it equals the target's own token. In a tree, of those that follow
the last one that stands.

Both are determined by the request's noise, so what is emitted is what plain decoding would have emitted
(../sampling/pipeline.py); the draft decides only how many tokens a step yields. On CUDA it is a kernel
(kernels/step.py); the torch here says what that does, and does it elsewhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kv.compaction import Path


def commit(
    state: DeviceState, feed: Feed, sampled: Tensor, meant: Tensor, results: Tensor, stands: Tensor | None = None
) -> None:
    """Append to each text the target's tokens as far as the drafts equal them, and the one behind.

    `sampled` is [R], the target's token of each row. `results`, [N, 3 + longest draft], become for each request: how
    many tokens it has got (0 where none was sampled), what `meant` [N] says of its drafts, and the target's tokens.
    `stands`, [N + 1], replaces the comparison by a given number of drafts (benchmarks only).
    """
    if state.tokens.is_cuda:
        from outrider_runtime.kernels import step

        step.commit(
            state.tokens,
            state.lengths,
            feed.slots,
            feed.drafts,
            feed.capacities,
            feed.first_rows,
            sampled,
            meant,
            results,
            stands,
        )
    else:
        walk(state, feed, sampled, meant, results, stands)


def walk(
    state: DeviceState, feed: Feed, sampled: Tensor, meant: Tensor, results: Tensor, stands: Tensor | None
) -> None:
    turns = torch.arange(results.shape[1] - 2, device=sampled.device, dtype=torch.int32)
    rows = (feed.first_rows.clamp(min=0).unsqueeze(1) + turns).clamp(max=len(sampled) - 1)
    target = sampled[rows].to(torch.int32)  # [N + 1, 1 + longest draft]
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
    results[:, 0], results[:, 1], results[:, 2:] = emitted[:-1], meant, target[:-1]


def commit_tree(
    state: DeviceState,
    feed: Feed,
    sampled: Tensor,
    meant: Tensor,
    results: Tensor,
    path: Path,
    stands: Tensor | None = None,
) -> None:
    """The same where drafts form trees, by `state.parents`: down from the text's end to the draft that is the target's
    token, the first of several, as long as there is one. Which ones stand goes to `path`.

    `stands` replaces the comparison by a given number of drafts: of those that follow, the first.
    """
    if state.tokens.is_cuda:
        from outrider_runtime.kernels import tree

        tree.commit(
            state.tokens,
            state.lengths,
            state.parents,
            feed.slots,
            feed.drafts,
            feed.capacities,
            feed.first_rows,
            sampled,
            meant,
            results,
            path.ends,
            path.nodes,
            stands,
        )
    else:
        walk_tree(state, feed, sampled, meant, results, path, stands)


def walk_tree(
    state: DeviceState,
    feed: Feed,
    sampled: Tensor,
    meant: Tensor,
    results: Tensor,
    path: Path,
    stands: Tensor | None,
) -> None:
    depth, most = path.nodes.shape[1], state.parents.shape[1]
    drafts = torch.arange(most, device=sampled.device, dtype=torch.int32)
    lengths, parents = state.lengths[feed.slots], state.parents[feed.slots]
    columns = (lengths.unsqueeze(1) + torch.arange(most + 1, device=sampled.device)).clamp(max=state.width)
    tokens = state.tokens[feed.slots.unsqueeze(1), columns[:, :-1]]
    # As in walk(): what a row without a place for its KV says does not count.
    there = drafts < torch.minimum(feed.drafts, feed.capacities - lengths).unsqueeze(1)
    rows = feed.first_rows.clamp(min=0)
    node, going = torch.zeros_like(rows), feed.first_rows >= 0
    emitted = torch.zeros_like(rows)
    path.ends[:], path.nodes[:] = lengths[:-1], -1
    for turn in range(depth + 1):
        target = sampled[(rows + node).clamp(max=len(sampled) - 1)].to(torch.int32)
        state.tokens[feed.slots, torch.where(going, columns[:, turn], state.width)] = target
        results[:, 2 + turn] = torch.where(going, target, 0)[:-1]
        emitted += going
        if turn == depth:
            break
        follows = there & (parents == node.unsqueeze(1))
        follows &= (tokens == target.unsqueeze(1)) if stands is None else (turn < stands).unsqueeze(1)
        following = torch.where(follows, drafts + 1, most + 1).amin(1)
        going &= following <= most
        node = torch.where(going, following, 0)
        path.nodes[:, turn] = torch.where(going, following, -1)[:-1]
    state.lengths[feed.slots] = torch.where(feed.slots == state.nobody, 1, lengths + emitted).clamp(max=state.width)
    results[:, 0], results[:, 1] = emitted[:-1], meant


LOTS = 4096  # a power of two


def draw_lots(accepted_length: float, slots: int, device: torch.device, *, shared: bool = False) -> Tensor:
    """For benchmarks: how many drafts stand in a step, so that it yields `accepted_length` tokens on average. By the
    slot and the length of its text modulo LOTS, [slots, LOTS], int32; the same on every call. `shared`: texts of the
    same length have the same lot, so that those that began together end together."""
    whole = int(accepted_length)
    chances = torch.rand(1 if shared else slots, LOTS, generator=torch.Generator().manual_seed(0))
    lots = whole - 1 + (chances < accepted_length - whole).to(torch.int32)
    return lots.expand(slots, LOTS).contiguous().to(device)


def draw_runs(chance: float, slots: int, device: torch.device) -> Tensor:
    """The same, where each draft behind one that stands has this chance, of (0, 1): as long as drafts may be."""
    lots = torch.rand(slots, LOTS, generator=torch.Generator().manual_seed(0)).clamp(min=1e-9)
    return (lots.log() / math.log(chance)).to(torch.int32).to(device)


def stands_by_lot(state: DeviceState, feed: Feed, lots: Tensor) -> Tensor:
    """How many drafts stand, [N + 1]. Cheap, so that it does not count in what is measured."""
    if lots.is_cuda:
        from outrider_runtime.kernels import step

        return step.stands_by_lot(state.lengths, feed.slots, lots)
    return lots[feed.slots, state.lengths[feed.slots] & (LOTS - 1)]
