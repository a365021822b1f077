"""Attention over the paged KV cache: the torch reference, on every device.

Requests of alike query and context length are padded into one group and attended to by one call, so that a batch of
decodes is a few kernels and a long prompt beside it does not inflate them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

SMALLEST_CONTEXT_BUCKET = 128  # below, padding costs less than another call
SMALLEST_QUERY_BUCKET = 8  # one decoded token, or a few to verify


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Padding repeats a request's last query, so it may be computed and written like the others."""

    queries: Tensor  # [requests, queries] int64, rows of the flattened batch
    slots: Tensor  # [requests, context] int64, in position order
    mask: Tensor  # [requests, queries, context] bool, true where a query sees a key


AttentionPlan = tuple[AttentionGroup, ...]


def plan_attention(
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    positions: Tensor,
    block_tables: Tensor,
    block_size: int,
    sliding_window: int | None = None,
) -> AttentionPlan:
    """Which rows of the flattened batch attend together, and to which slots. Made once a step, used by every layer."""
    first_rows = [0]
    for length in query_lengths:
        first_rows.append(first_rows[-1] + length)
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for request, (queries, context) in enumerate(zip(query_lengths, context_lengths, strict=True)):
        bucket = _bucket(queries, SMALLEST_QUERY_BUCKET), _bucket(context, SMALLEST_CONTEXT_BUCKET)
        groups[bucket].append(request)
    plan = []
    for members in groups.values():
        width = max(query_lengths[request] for request in members)
        context = max(context_lengths[request] for request in members)
        rows = [
            [first_rows[request] + min(query, query_lengths[request] - 1) for query in range(width)]
            for request in members
        ]
        query_rows = torch.tensor(rows, device=positions.device)
        keys = torch.arange(context, device=positions.device)
        tables = block_tables[torch.tensor(members, device=positions.device)]
        distance = positions[query_rows].unsqueeze(-1) - keys  # [requests, queries, context]
        mask = distance >= 0
        if sliding_window is not None:
            mask &= distance < sliding_window
        slots = tables[:, keys // block_size] * block_size + keys % block_size
        plan.append(AttentionGroup(query_rows, slots, mask))
    return tuple(plan)


def attend(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Softmax attention of each token to the positions its group's mask allows.

    `query` is [tokens, heads, dim]; `keys` and `values` are a layer's arrays, [slots, kv heads, dim], the step's own
    tokens written already. Returns [tokens, heads, dim].
    """
    _, heads, dim = query.shape
    kv_heads = keys.shape[1]
    shared = heads // kv_heads  # query heads per KV head, packed as more queries
    result = torch.empty_like(query)
    for group in plan:
        requests, width = group.queries.shape
        packed = query[group.queries].view(requests, width, kv_heads, shared, dim)
        packed = packed.permute(0, 2, 3, 1, 4).reshape(requests, kv_heads, shared * width, dim)
        mask = group.mask.unsqueeze(1).repeat(1, 1, shared, 1)  # [requests, 1, shared * queries, context]
        attended = F.scaled_dot_product_attention(
            packed, keys[group.slots].transpose(1, 2), values[group.slots].transpose(1, 2), mask, scale=scale
        )
        unpacked = attended.view(requests, kv_heads, shared, width, dim).permute(0, 3, 1, 2, 4)
        result[group.queries] = unpacked.reshape(requests, width, heads, dim)
    return result


def _bucket(length: int, smallest: int) -> int:
    """The next power of two."""
    return max(smallest, 1 << (length - 1).bit_length())
