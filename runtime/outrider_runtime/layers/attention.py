"""Attention over the paged KV cache: by a kernel of our own on CUDA, by torch elsewhere.

In torch, requests of alike query and context length are padded into one group and attended to by one call, so that a
batch of decodes is a few calls and a long prompt beside it does not inflate them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

SMALLEST_CONTEXT_BUCKET = 128  # below, padding costs less than another call
SMALLEST_QUERY_BUCKET = 8  # one decoded token, or a few to verify
REGISTERS, MOST_REGISTERS = 1 << 16, 255  # of a processor, and of a thread, on every GPU since Ampere


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a plan must know of the model."""

    kv_heads: int
    shared: int  # query heads per KV head, packed as more queries of one head
    sliding_window: int | None
    dtype: torch.dtype
    full_layers: bool = False  # some layers have no window, though others have
    softcap: float | None = None  # bounds scores: softcap * tanh(score / softcap)
    first: int = 0  # positions before it hold no KV, and no query is at one of them


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Padding repeats a request's last query, so it may be computed and written like the others."""

    rows: Tensor  # [requests, queries] int64, of the flattened batch
    slots: Tensor  # [requests, context] int64, in position order
    bias: Tensor  # [requests, 1, shared * queries, context], 0 where a query sees a key, else -inf
    whole: bool  # its rows are all of the batch's, in order
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program of the kernel works: `rows` (queries x heads that share a KV head) against `keys` at a time."""

    rows: int
    keys: int
    stages: int  # of the pipeline that loads them
    warps: int
    per_processor: int  # programs of the persistent grid

    @property
    def registers(self) -> int:
        """A thread's at most, which has them by eights, for there to be room for all those programs: were one of them
        to wait for another to end, a third of the time would be lost."""
        return min(MOST_REGISTERS, REGISTERS // (32 * self.warps * self.per_processor) // 8 * 8)

    def piece(self, dim: int) -> int:
        """The elements of values that a product takes, of a head of this size: all, or, where sixteen rows could be
        each warp's own, so few that the compiler makes them that. Else warps share rows, and wait for one another at
        each maximum and each sum: for five queries of each of 256 requests 9 % of the kernel's time."""
        return min(dim, 32) if self.rows == 16 * self.warps < 64 else dim

    def padded_rows(self, shared: int) -> int:
        return max(self.rows, 1 << (shared - 1).bit_length())

    def queries(self, shared: int) -> int:
        return self.padded_rows(shared) // shared

    def within(self, limit: int, dim: int, itemsize: int) -> Tile:
        """With fewer stages, then smaller, until it takes at most `limit` bytes of shared memory, 48 KiB or more."""
        tile = self
        while (tile.rows + 2 * tile.stages * tile.keys) * dim * itemsize > limit:
            if tile.stages > 2:
                tile = replace(tile, stages=tile.stages - 1)
            else:
                tile = replace(tile, rows=max(16, tile.rows // 2), keys=max(16, tile.keys // 2))
        return tile


@dataclass(frozen=True, slots=True)
class Tuning:
    """Requests of up to `small_queries` queries take the small tile, or, in steps without any of more than two, the
    narrow one, and their contexts are split, where that keeps programs busy, into parts of `split_tokens` or more and
    a `max_splits`th of the longest. Where others in the batch change how a context is split, its result may change in
    the last bit."""

    narrow: Tile
    small: Tile
    large: Tile
    small_queries: int
    split_tokens: int
    max_splits: int


@dataclass(frozen=True, slots=True)
class WorkList:
    """What one launch of the kernel does."""

    items: Tensor  # [fields, capacity] int32, by kernels/attention.py
    slots: int  # that few queries' contexts are divided among, each for a program of each KV head; 0: none is split
    splits: int  # a tile's, at most
    tile: Tile


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """What the kernel needs, by kernels.attention.plan_paged; shared by all layers of a model."""

    lists: tuple[WorkList, ...]
    tokens: int
    block_tables: Tensor  # [slots, blocks] int32
    block_size: int
    shape: AttentionShape
    ancestors: Tensor | None  # [tokens] int64


LayerPlan = tuple[AttentionGroup, ...] | PagedPlan


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """Of a model whose layers differ in that some have a window."""

    windowed: LayerPlan
    full: LayerPlan


AttentionPlan = LayerPlan | MixedPlan


def plan_layers(shape: AttentionShape, plan: Callable[[AttentionShape], LayerPlan]) -> AttentionPlan:
    """By `plan`, for each kind of layer that the model has."""
    return plan_steps(shape, lambda kind: [plan(kind)])[0]


def plan_steps(shape: AttentionShape, plan: Callable[[AttentionShape], Sequence[LayerPlan]]) -> list[AttentionPlan]:
    """plan_layers() for several steps, which `plan` plans together."""
    if not shape.full_layers:
        return list(plan(shape))
    windowed = replace(shape, full_layers=False)
    both = zip(plan(windowed), plan(replace(windowed, sliding_window=None)), strict=True)
    return [MixedPlan(*kinds) for kinds in both]


def plan_attention(
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    positions: Tensor,
    block_tables: Tensor,
    block_size: int,
    shape: AttentionShape,
    ancestors: Tensor | None = None,
    before: int = 0,
) -> tuple[AttentionGroup, ...]:
    """Which rows of the flattened batch attend together, and to which slots. Made once a step, used by every layer.

    `positions` are those of the tokens' KV; `ancestors` and `before` are kernels.attention.plan_paged()'s.
    """
    first_rows = [0, *accumulate(query_lengths)]
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for request, (queries, context) in enumerate(zip(query_lengths, context_lengths, strict=True)):
        bucket = _bucket(queries, SMALLEST_QUERY_BUCKET), _bucket(context, SMALLEST_CONTEXT_BUCKET)
        groups[bucket].append(request)
    plan = []
    for members in groups.values():
        width = max(query_lengths[request] for request in members)
        context = max(context_lengths[request] for request in members)
        rows = torch.tensor(
            [
                [first_rows[request] + min(query, query_lengths[request] - 1) for query in range(width)]
                for request in members
            ],
            device=positions.device,
        )
        keys = torch.arange(context, device=positions.device)
        tables = block_tables[torch.tensor(members, device=positions.device)]
        distances, others = positions[rows].unsqueeze(-1) - keys, None
        if ancestors is not None:
            trees = [context_lengths[request] - query_lengths[request] - before for request in members]
            own = keys - torch.tensor(trees, device=positions.device).view(-1, 1, 1)
            distances, others = _in_trees(distances, own, ancestors[rows].unsqueeze(-1))
        plan.append(
            AttentionGroup(
                rows=rows,
                slots=tables[:, keys // block_size] * block_size + keys % block_size,
                bias=_bias(distances, others, keys < shape.first, shape),
                whole=len(groups) == 1 and rows.numel() == first_rows[-1],
                softcap=shape.softcap,
            )
        )
    return tuple(plan)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float, *, windowed: bool = True
) -> Tensor:
    """Softmax attention of each token to the positions its group's bias leaves.

    `query` is [tokens, heads, dim]; `keys` and `values` are a layer's arrays, [slots, kv heads, dim], the step's own
    tokens written already. `windowed`: the layer has the window, if any has. Returns [tokens, heads, dim].
    """
    if isinstance(plan, MixedPlan):
        plan = plan.windowed if windowed else plan.full
    if isinstance(plan, PagedPlan):
        from outrider_runtime.kernels.attention import paged_attention  # Triton, which a CPU does without

        return paged_attention(query, keys, values, plan, scale)
    if plan[0].whole:
        return _attend(query, keys, values, plan[0], scale)
    result = torch.empty_like(query)
    for group in plan:
        result[group.rows.flatten()] = _attend(query[group.rows.flatten()], keys, values, group, scale)
    return result


def _attend(query: Tensor, keys: Tensor, values: Tensor, group: AttentionGroup, scale: float) -> Tensor:
    """The same for one group, whose [requests * queries, heads, dim] are given and returned."""
    requests, queries = group.rows.shape
    _, heads, dim = query.shape
    kv_heads = keys.shape[1]
    query = query.reshape(requests, queries, kv_heads, heads // kv_heads, dim)
    packed = query.permute(0, 2, 3, 1, 4).reshape(requests, kv_heads, -1, dim)
    key, value = keys[group.slots].transpose(1, 2), values[group.slots].transpose(1, 2)
    if group.softcap is None:
        attended = F.scaled_dot_product_attention(packed, key, value, group.bias, scale=scale)
    else:
        scores = group.softcap * torch.tanh(packed @ key.transpose(2, 3) * (scale / group.softcap))
        attended = torch.softmax(scores + group.bias, dim=-1) @ value
    unpacked = attended.view(requests, kv_heads, -1, queries, dim).permute(0, 3, 1, 2, 4)
    return unpacked.reshape(requests * queries, heads, dim)


def _in_trees(distances: Tensor, own: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
    """How far back keys are along a query's branch, and which are of other branches, each [requests, queries, context].

    `own` [requests, 1, context] says which of its tree's tokens a key is, negative if of none."""
    bits = torch.arange(64, device=own.device)
    others = (own >= 0) & ((ancestors >> own.clamp(0, 63)) & 1 == 0)
    depths = ((ancestors >> bits) & 1).sum(-1, keepdim=True) - 1
    return torch.where(ancestors == -1, distances, torch.where(others | (own < 0), depths - own, 0)), others


def _bias(distance: Tensor, others: Tensor | None, empty: Tensor, shape: AttentionShape) -> Tensor:
    """From [requests, queries, context] distances back, negative for the future. What is `empty`, [context], is seen by
    none but itself: padding needs something to look at."""
    unseen = (distance < 0) | (empty & (distance != 0))
    if others is not None:
        unseen |= others
    if shape.sliding_window is not None:
        unseen |= distance >= shape.sliding_window
    bias = torch.zeros(unseen.shape, dtype=shape.dtype, device=unseen.device).masked_fill_(unseen, -torch.inf)
    return bias.repeat(1, shape.shared, 1).unsqueeze(1)


def _bucket(length: int, smallest: int) -> int:
    """The next power of two."""
    return max(smallest, 1 << (length - 1).bit_length())
