"""Paged, grouped, padded attention is plain attention over each request's own tokens."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.batches import Span, make_batch
from tests.runtime.kernels.paged import expected, make_case
from tests.runtime.trees import mask, random_tree

from outrider_runtime.layers.attention import AttentionShape, attend
from outrider_runtime.layers.batch import attention_plan

KV_HEADS, SHARED, DIM = 2, 3, 8
spans = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=1, max_size=6)


def plainly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None, softcap: float | None
):
    """One request: [queries, heads, dim] over [context, kv heads, dim], in double precision."""
    keys, values = (each.double().repeat_interleave(SHARED, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * DIM**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = (start + torch.arange(len(query))).unsqueeze(1) - torch.arange(len(keys))
    unseen = (distance < 0) | (distance >= (window or 10_000))
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).float()


@settings(max_examples=60)
@given(
    spans=spans,
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 7]),
    softcap=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 9),
)
def test_whatever_the_lengths(spans, block_size, window, softcap, seed):
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(start + length) // block_size) for length, start in spans]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    arrays = torch.randn(2, len(order) * block_size, KV_HEADS, DIM, generator=generator)
    members = []
    for (length, start), count in zip(spans, counts, strict=True):
        members.append(Span([0] * length, start, [order.pop() for _ in range(count)]))
    batch = make_batch(
        members, block_size, "cpu", AttentionShape(KV_HEADS, SHARED, window, torch.float32, softcap=softcap)
    )
    query = torch.randn(len(batch.positions), KV_HEADS * SHARED, DIM, generator=generator)
    attended = attend(query, *arrays, batch.attention, DIM**-0.5)
    parts = zip(
        members, *(each.split([len(span.token_ids) for span in members]) for each in (query, attended)), strict=True
    )
    for span, own_query, own in parts:
        slots = torch.tensor([block * block_size + i for block in span.blocks for i in range(block_size)])[: span.end]
        expected = plainly(own_query, arrays[0][slots], arrays[1][slots], span.start, window, softcap)
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_what_lies_at_an_empty_first_position_is_never_read():
    shape = AttentionShape(KV_HEADS, SHARED, None, torch.float32, first=1)
    batch = make_batch([Span([5, 6, 7], 3, [3, 2]), Span([8], 1, [1])], 4, "cpu", shape)
    arrays = torch.randn(2, 16, KV_HEADS, DIM)
    query = torch.randn(4, KV_HEADS * SHARED, DIM)
    attended = attend(query, *arrays, batch.attention, DIM**-0.5)
    slots = torch.tensor([13, 14, 15, 8, 9])  # the first request's, from position 1 on
    plain = plainly(query[:3], arrays[0][slots], arrays[1][slots], 2, None, None)
    torch.testing.assert_close(attended[:3], plain, rtol=1e-4, atol=1e-5)
    arrays[:, [12, 4]] = 1e4
    assert torch.equal(attend(query, *arrays, batch.attention, DIM**-0.5), attended)


def test_slots_follow_the_block_table():
    shape = AttentionShape(KV_HEADS, SHARED, None, torch.float32)
    batch = make_batch([Span([5, 6, 7], 3, [9, 2]), Span([8], 0, [4])], 4, "cpu", shape)
    assert batch.token_ids.tolist() == [5, 6, 7, 8]
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert batch.slots.tolist() == [39, 8, 9, 16]


@settings(max_examples=30)
@given(
    trees=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40), st.booleans()), min_size=1, max_size=4),
    window=st.sampled_from([None, 6, 20]),
    before=st.sampled_from([0, 3]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_a_tree_sees_its_branches_and_its_window_goes_along_them(trees, window, before, padding, seed):
    """Beside requests without one, which see all before."""
    lots = random.Random(seed)
    spans, masks = [], []
    for drafts, text, grows in trees:
        spans.append((1 + drafts, before + text + 1 + drafts))
        parents = random_tree(lots, before + drafts, 5)
        masks += [mask(parents, number) if grows else -1 for number in range(before, before + 1 + drafts)]
    case = make_case(spans, window=window, padding=padding, block_size=4, seed=seed)
    ancestors = torch.tensor([*masks, *[-1] * padding])
    plan = attention_plan(
        torch.tensor(case.starts, dtype=torch.int32),
        torch.tensor([context for _, context in spans], dtype=torch.int32),
        case.table_rows,
        case.block_tables,
        tokens=len(case.query),
        block_size=4,
        dim=16,
        shape=case.shape,
        small=False,
        ancestors=ancestors,
        before=before,
    )
    attended = attend(case.query, case.keys, case.values, plan, case.scale)
    real = case.starts[-1]
    result = expected(case, ancestors, before)[:real]
    torch.testing.assert_close(attended[:real].double(), result, rtol=1e-4, atol=1e-5)
