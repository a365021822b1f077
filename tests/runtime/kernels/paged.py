"""Requests over a paged cache with shuffled blocks, and what attention over them is, in float64, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_runtime.layers.attention import AttentionShape, PagedPlan, attend


@dataclass(frozen=True)
class Case:
    spans: list[tuple[int, int]]  # queries and context of each request; the queries are the context's last
    block_size: int
    shape: AttentionShape
    query: Tensor  # [tokens, heads, dim], padding behind the requests' rows
    keys: Tensor
    values: Tensor
    block_tables: Tensor
    table_rows: Tensor

    @property
    def starts(self) -> list[int]:
        starts = [0]
        for queries, _ in self.spans:
            starts.append(starts[-1] + queries)
        return starts

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5


def make_case(
    spans: Sequence[tuple[int, int]],
    *,
    kv_heads: int = 2,
    shared: int = 2,
    dim: int = 16,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    first: int = 0,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-context // block_size) for _, context in spans]
    order = (torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))).tolist()
    block_tables = torch.zeros(len(spans) + 1, max([*counts, 1]), dtype=torch.int32)
    table_rows = torch.randperm(len(spans) + 1, generator=torch.Generator().manual_seed(seed))[: len(spans)]
    for row, count in zip(table_rows.tolist(), counts, strict=True):
        block_tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    slots = (sum(counts) + 2) * block_size
    tokens = sum(queries for queries, _ in spans) + padding
    keys, values = torch.randn(2, slots, kv_heads, dim, generator=generator, device=device).to(dtype)
    query = torch.randn(tokens, kv_heads * shared, dim, generator=generator, device=device).to(dtype)
    return Case(
        list(spans),
        block_size,
        AttentionShape(kv_heads, shared, window, dtype, softcap=softcap, first=first),
        query,
        keys,
        values,
        block_tables.to(device),
        table_rows.to(torch.int32).to(device),
    )


def planned(
    case: Case, *, small: bool, narrow: bool = False, ancestors: Tensor | None = None, before: int = 0, tuning=None
) -> PagedPlan:
    from outrider_runtime.kernels.attention import plan_paged  # once it is settled whether Triton interprets

    return plan_paged(
        torch.tensor(case.starts, dtype=torch.int32, device=case.query.device),
        torch.tensor([context for _, context in case.spans], dtype=torch.int32, device=case.query.device),
        case.table_rows,
        case.block_tables,
        tokens=len(case.query),
        block_size=case.block_size,
        shape=case.shape,
        dim=case.query.shape[-1],
        small=small,
        narrow=narrow,
        ancestors=ancestors,
        before=before,
        tuning=tuning,
    )


def attended(case: Case, plan: PagedPlan) -> Tensor:
    return attend(case.query, case.keys, case.values, plan, case.scale)


def expected(case: Case, ancestors: Tensor | None = None, before: int = 0) -> Tensor:
    """[tokens, heads, dim] float64; zeros where a query sees nothing."""
    result = torch.zeros(case.query.shape, dtype=torch.float64, device=case.query.device)
    for (queries, context), start, row in zip(case.spans, case.starts, case.table_rows.tolist(), strict=False):
        if not queries:
            continue
        key = torch.arange(context, device=case.query.device)
        slots = case.block_tables[row, key // case.block_size].long() * case.block_size + key % case.block_size
        keys, values = (
            each[slots].double().repeat_interleave(case.shape.shared, dim=1) for each in (case.keys, case.values)
        )
        own = slice(start, start + queries)
        scores = torch.einsum("qhd,khd->hqk", case.query[own].double(), keys) * case.scale
        if (softcap := case.shape.softcap) is not None:
            scores = softcap * torch.tanh(scores / softcap)
        step = context - queries
        position = (step + torch.arange(queries, device=case.query.device)).unsqueeze(1)
        visible = key <= position
        if ancestors is not None:
            tree, bits = step - before, torch.arange(64, device=key.device)
            seen = ancestors[own].unsqueeze(1)
            visible &= (key < tree) | (seen >> (key - tree).clamp(0, 63) & 1 == 1)
            depth = (seen >> bits & 1).sum(1, keepdim=True) - 1
            position = torch.where(seen == -1, position, tree + depth)
        if case.shape.sliding_window is not None:
            visible &= key > position - case.shape.sliding_window
        visible &= key >= case.shape.first
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
        result[own] = torch.einsum("hqk,khd->qhd", weights, values)
    return result
