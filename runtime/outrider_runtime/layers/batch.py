"""A step's input: the tokens of all its requests, flattened, and where their KV lies.

Target and draft take the same kind of batch, over the same block tables, each with KV arrays of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_runtime.layers.attention import AttentionPlan, AttentionShape, plan_attention, plan_layers, plan_steps


@dataclass(frozen=True, slots=True)
class Batch:
    """`slots` is where each token's keys and values are written: block x block size + offset."""

    token_ids: Tensor  # [tokens] int32 or int64, like the next two
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]
    attention: AttentionPlan


def attention_plan(
    query_starts: Tensor,
    context_lengths: Tensor,
    table_rows: Tensor,
    block_tables: Tensor,
    *,
    tokens: int,
    block_size: int,
    dim: int,
    shape: AttentionShape,
    small: bool,
    narrow: bool = False,
    ancestors: Tensor | None = None,
    before: int = 0,
) -> AttentionPlan:
    """For [requests + 1] query starts, [requests] contexts (the step's own tokens included) and rows of the tables.

    `tokens` is the batch's width, and `dim` a head's. `small`: no request has more than a few queries; `narrow`:
    not even more than two. Requests without any are padding, and so are tokens behind the last query. `ancestors` and
    `before` are plan_paged()'s, for trees.
    """
    if query_starts.is_cuda:
        from outrider_runtime.kernels.attention import plan_paged  # Triton, which a CPU does without

        return plan_layers(
            shape,
            lambda kind: plan_paged(
                query_starts,
                context_lengths,
                table_rows,
                block_tables,
                tokens=tokens,
                block_size=block_size,
                shape=kind,
                dim=dim,
                small=small,
                narrow=narrow,
                ancestors=ancestors,
                before=before,
            ),
        )
    present = query_starts.diff().nonzero().squeeze(1)
    lengths, contexts = query_starts.diff()[present].tolist(), context_lengths[present].tolist()
    tables = block_tables[table_rows[present]].long()
    if (padding := tokens - sum(lengths)) > 0:  # as if it were one more request's
        lengths, contexts = [*lengths, padding], [*contexts, padding]
        tables = torch.cat((tables, torch.zeros_like(block_tables[:1], dtype=tables.dtype)))
    spans = [torch.arange(end - length, end) for length, end in zip(lengths, contexts, strict=True)]
    positions = torch.cat(spans).to(query_starts.device)
    return plan_layers(
        shape,
        lambda kind: plan_attention(lengths, contexts, positions, tables, block_size, kind, ancestors, before),
    )


def decode_plans(
    query_starts: Tensor,
    context_lengths: Tensor,
    table_rows: Tensor,
    block_tables: Tensor,
    *,
    block_size: int,
    dim: int,
    shape: AttentionShape,
) -> list[AttentionPlan]:
    """attention_plan() for steps of one query a request, whose contexts are [steps, requests]; on CUDA all at once."""
    if query_starts.is_cuda:
        from outrider_runtime.kernels.attention import plan_decodes

        return plan_steps(
            shape,
            lambda kind: plan_decodes(
                query_starts, context_lengths, table_rows, block_tables, block_size=block_size, shape=kind, dim=dim
            ),
        )
    return [
        attention_plan(
            query_starts,
            contexts,
            table_rows,
            block_tables,
            tokens=len(contexts),
            block_size=block_size,
            dim=dim,
            shape=shape,
            small=True,
            narrow=True,
        )
        for contexts in context_lengths
    ]
