"""The kernel computes each request's attention as float64 does, whatever shares its batch and its programs."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.runtime.kernels.paged import attended, expected, make_case, planned
from tests.runtime.trees import mask, random_tree

from outrider_runtime.kernels import attention
from outrider_runtime.kernels.limits import HOPPER
from outrider_runtime.layers.attention import Tile, Tuning

SMALL = Tile(rows=8, keys=16, stages=2, warps=4, per_processor=2)
LARGE = Tile(rows=32, keys=16, stages=2, warps=4, per_processor=2)
NARROW = Tile(rows=16, keys=16, stages=2, warps=4, per_processor=2)
TUNING = Tuning(narrow=NARROW, small=SMALL, large=LARGE, small_queries=6, split_tokens=32, max_splits=4)


def check(case, *, small=False, narrow=False, tolerance=1e-5, tuning=TUNING):
    result = attended(case, planned(case, small=small, narrow=narrow, tuning=tuning))
    torch.testing.assert_close(result.double(), expected(case), rtol=tolerance, atol=tolerance)
    assert not attention._counters(torch.device("cpu")).any()
    return result


queries_and_context = st.tuples(st.integers(0, 12), st.integers(0, 70)).map(lambda pair: (pair[0], sum(pair)))


@settings(max_examples=5)
@given(
    spans=st.lists(queries_and_context, min_size=1, max_size=3),
    block_size=st.sampled_from([1, 16, 64]),
    window=st.sampled_from([None, None, 1, 40]),
    padding=st.sampled_from([0, 9]),
    small=st.booleans(),
    first=st.sampled_from([0, 1]),
)
def test_whatever_the_lengths(spans, block_size, window, padding, small, first):
    if sum(queries for queries, _ in spans) + padding == 0:
        padding = 1
    check(make_case(spans, block_size=block_size, window=window, padding=padding, first=first), small=small)


@pytest.mark.parametrize(("kv_heads", "shared", "dim"), [(3, 1, 16), (1, 7, 80), (1, 12, 8)])
def test_heads_of_any_number_and_size(kv_heads, shared, dim):
    check(make_case([(1, 40), (7, 9)], kv_heads=kv_heads, shared=shared, dim=dim))


@pytest.mark.parametrize(("dim", "piece", "window"), [(128, 32, None), (80, 32, 40), (16, 16, None)])
def test_values_are_weighed_in_pieces_where_that_gives_each_warp_rows_of_its_own(dim, piece, window):
    tile = Tile(rows=32, keys=16, stages=2, warps=2, per_processor=2)
    assert tile.piece(1 << (dim - 1).bit_length()) == piece
    case = make_case([(5, 90), (3, 40), (5, 5)], shared=4, dim=dim, window=window, padding=3)
    check(case, small=True, tuning=replace(TUNING, small=tile))


@pytest.mark.parametrize(("warps", "programs", "registers"), [(2, 4, 255), (2, 5, 200), (4, 4, 128), (1, 7, 255)])
def test_as_many_programs_have_room_as_a_tile_says(warps, programs, registers):
    tile = Tile(rows=32, keys=32, stages=2, warps=warps, per_processor=programs)
    assert tile.registers == registers
    assert -(-registers // 8) * 8 * 32 * warps * programs <= 1 << 16  # a thread has them by eights


def test_a_step_of_a_query_or_two_each():
    check(make_case([(1, 40), (2, 17), (0, 3), (2, 2)], shared=4, padding=3), narrow=True)


def test_padding_alone_is_zeros_even_for_one_program_of_a_head(monkeypatch):
    monkeypatch.setattr(attention, "processors", lambda device: 1)
    assert not check(make_case([(0, 41)], shared=3, padding=3), small=True).any()


def test_scores_are_bounded_where_the_model_says_so():
    case = make_case([(1, 40), (9, 20)], softcap=0.7)
    bounded = check(case)
    without = replace(case, shape=replace(case.shape, softcap=None))
    assert not torch.allclose(bounded, attended(without, planned(without, small=False, tuning=TUNING)), atol=1e-2)


def test_in_half_precision():  # not in bfloat16, whose products the interpreter does not know
    case = make_case([(1, 90), (10, 40)], dtype=torch.float16)
    assert check(case, tolerance=3e-3).dtype == torch.float16


FIELDS = ("ROW", "QUERIES", "POSITION", "BEGIN", "END", "TABLE", "STEP", "PARTS", "FIRST")


def walked(work):
    """Of each slot the items that its programs come by, as dicts."""
    slots = []
    for slot in range(work.slots):
        slots.append([])
        number = slot
        while number < work.items.shape[1]:
            item = {field: int(work.items[getattr(attention, field).value, number]) for field in FIELDS}
            if not item["QUERIES"]:
                break
            slots[-1].append(item | {"PART": 2 * slot + (number != slot)})
            number = int(work.items[attention.NEXT.value, number])
    return slots


def parts_of(work):
    """Of each tile, its parts in order, as what each is of its text."""
    tiles = defaultdict(list)
    for item in chain.from_iterable(walked(work)):
        tiles[item["ROW"]].append((item["BEGIN"], item["END"]))
    return [sorted(tiles[row]) for row in sorted(tiles)]


def divided(monkeypatch, contexts, *, queries=1, batch=None, processors=132):
    """The work list for eight KV heads and these contexts, as a model of 128 a head has it in a batch of that many
    tokens."""
    monkeypatch.setattr(attention, "processors", lambda device: processors)
    case = make_case([(queries, context) for context in contexts], kv_heads=8, shared=4, dim=8)
    tuning = attention.tuning_for(torch.bfloat16, 128, batch or len(case.query), single=queries == 1)
    (work,) = planned(case, small=True, narrow=queries == 1, tuning=tuning).lists
    return work


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("each", [1, 2])
def test_texts_of_about_one_length_are_read_whole_where_that_leaves_few_programs_idle(monkeypatch, queries, each):
    contexts = [2100 + index for index in range(8 * each)]
    work = divided(monkeypatch, contexts, queries=queries, batch=320, processors=17)  # 68 programs, eight slots
    assert parts_of(work) == [[(0, context)] for context in contexts]
    assert [len(items) for items in walked(work)] == [each] * 8


@pytest.mark.parametrize(("context", "parts"), [(31, 1), (384, 12), (4096, 16), (4224, 15)])
def test_a_lone_text_is_read_by_as_many_programs_as_gain_by_it(monkeypatch, context, parts):
    (found,) = parts_of(divided(monkeypatch, [context]))
    sizes = [end - begin for begin, end in found]
    assert len(found) == parts
    assert len(set(sizes[:-1])) <= 1
    assert sizes[-1] <= sizes[0]


def test_a_long_text_beside_short_ones_is_read_by_many_programs(monkeypatch):
    *short, long = parts_of(divided(monkeypatch, [300] * 15 + [8192], batch=320))
    assert len(long) in (15, 16)
    assert sum(len(parts) == 1 for parts in short) > 5


@pytest.mark.parametrize("queries", [2, 12])  # of a batch that combines all parts of a tile at once, and of a wider one
def test_many_parts_are_combined_as_if_they_were_one(monkeypatch, queries):
    monkeypatch.setattr(attention, "processors", lambda device: 40)
    case = make_case([(queries, 500), (1, 30)])
    plan = planned(case, small=True, tuning=replace(TUNING, max_splits=16))
    assert max(map(len, parts_of(plan.lists[0]))) > 2 * attention.AT_ONCE
    torch.testing.assert_close(attended(case, plan).double(), expected(case), rtol=1e-5, atol=1e-5)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 900)), min_size=1, max_size=8),
    padding=st.integers(0, 40),
    programs=st.integers(1, 40),
    window=st.sampled_from([None, None, 200]),
)
@example(spans=[(13, 436), (13, 436), (18, 319)], padding=1, programs=9, window=None)  # tiles that see less than others
def test_every_key_is_read_once_and_by_programs_that_have_about_as_many(monkeypatch, spans, padding, programs, window):
    monkeypatch.setattr(attention, "processors", lambda device: programs)
    spans = [(queries, queries + before) for queries, before in spans]
    case = make_case(spans, kv_heads=1, padding=padding + (not any(queries for queries, _ in spans)), window=window)
    (work,) = planned(case, small=True, tuning=TUNING).lists
    slots, keys, most = walked(work), SMALL.keys, TUNING.max_splits
    items = list(chain.from_iterable(slots))
    parts = [item["PART"] for item in items if item["PARTS"] > 1]
    assert len(set(parts)) == len(parts)
    assert all(0 <= part < 2 * work.slots for part in parts)
    tiles = defaultdict(list)
    for item in items:
        tiles[item["ROW"]].append(item)
    rows = []
    for own in tiles.values():
        (row, queries, position, count, first), *others = {
            tuple(item[field] for field in ("ROW", "QUERIES", "POSITION", "PARTS", "FIRST")) for item in own
        }
        assert not others
        assert count == len(own) <= most
        rows += range(row, row + queries)
        assert [item["PART"] for item in own] == [
            first,
            *((first // 2 + 1 + number) * 2 for number in range(count - 1)),
        ]
        assert own[0]["BEGIN"] == (0 if window is None else max(position - window + 1, 0) // keys * keys)
        for part, following in pairwise(own):  # where a window ends early, the last of them may be empty
            assert part["END"] == min(following["BEGIN"], position + queries)
        assert own[-1]["END"] == position + queries
    assert sorted(rows) == list(range(len(case.query)))
    lengths = [sum(-(-(part["END"] - part["BEGIN"]) // keys) or 1 for part in slot) for slot in slots]
    longest = max((-(-context // keys) for queries, context in spans if queries), default=1)
    if window is None:  # else a tile may see less than is taken for it
        # Each tile is taken for as long as the last one of its request, of padding for one.
        tile = work.tile.queries(case.shape.shared)
        taken = sum(-(-queries // tile) * -(-context // keys) for queries, context in spans)
        taken += -(-(len(case.query) - sum(queries for queries, _ in spans)) // tile)
        even = max(-(-taken // work.slots), -(-longest // (most - 1)), min(TUNING.split_tokens // keys, longest))
        assert max(lengths) <= even * 17 / 16 + -(-attention.CUT_TOKENS.value // keys)


@pytest.mark.parametrize("window", [None, 20])
def test_decodes_planned_together_are_each_planned_as_alone(window):
    case = make_case([(1, 200), (1, 3), (1, 130), (1, 17)], window=window)
    starts, contexts = torch.arange(5, dtype=torch.int32), torch.tensor([[120, 1, 100, 15], [121, 2, 101, 16]]).int()
    tables = {"table_rows": case.table_rows, "block_tables": case.block_tables}
    of = {"block_size": case.block_size, "shape": case.shape, "dim": 16}
    together = attention.plan_decodes(starts, contexts, **tables, **of)
    for plan, alone in zip(together, contexts, strict=True):
        expected = attention.plan_paged(starts, alone, **tables, **of, tokens=4, small=True, narrow=True)
        (ours,), (theirs,) = plan.lists, expected.lists
        assert walked(ours) == walked(theirs)
        assert (ours.slots, ours.splits, ours.tile) == (theirs.slots, theirs.splits, theirs.tile)


def test_a_token_is_verified_to_the_bit_as_it_is_decoded():
    verified = make_case([(4, 70)])
    result = attended(verified, planned(verified, small=True, tuning=TUNING))
    for query in (0, 2):
        decoded = replace(verified, spans=[(1, 67 + query)], query=verified.query[query : query + 1])
        assert torch.equal(attended(decoded, planned(decoded, small=True, tuning=TUNING))[0], result[query])


@pytest.mark.parametrize("small", [True, False])
def test_what_lies_at_an_empty_first_position_is_never_read(small):
    case = make_case([(1, 90), (2, 3), (40, 70), (3, 34)], first=1)
    before = check(case, small=small)
    for row in case.table_rows.tolist():
        slot = case.block_tables[row, 0] * 16
        case.keys[slot], case.values[slot] = 1e4, 1e4
    assert torch.equal(attended(case, planned(case, small=small, tuning=TUNING)), before)


def test_a_query_before_the_first_position_sees_nothing():
    case = make_case([(2, 2)])
    case = replace(case, spans=[(2, 1)])
    result = attended(case, planned(case, small=True, tuning=TUNING))
    assert not result[0].any()
    assert torch.equal(result[1, :2], case.values[case.block_tables[case.table_rows[0], 0] * 16, :1].expand(2, -1))


def forest(*tokens: int | None, before: int = 0) -> torch.Tensor:
    """Ancestors of random trees of so many tokens beside requests without one, None; only those behind `before`."""
    lots, masks = random.Random(0), []
    for count in tokens:
        if count is None:
            masks.append(-1)
        else:
            parents = random_tree(lots, before + count - 1, 5)
            masks += [mask(parents, number) for number in range(before, before + count)]
    return torch.tensor(masks)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("small", [True, False])
def test_trees_see_their_branches_and_prompts_beside_them_all_before(small, window):
    """And so do those of more than 64 tokens, though there is no bit for each."""
    spans = [(7, 40), (1, 5), (64, 66) if small else (70, 80)]
    case = make_case(spans, window=window, kv_heads=1, shared=1, padding=2)
    ancestors = torch.cat([forest(7, None), forest(64) if small else torch.full((70,), -1), torch.tensor([0, 0])])
    result = attended(case, planned(case, small=small, ancestors=ancestors, tuning=TUNING))
    torch.testing.assert_close(result.double(), expected(case, ancestors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_a_tree_may_have_begun_before_the_step(window):
    case = make_case([(4, 60), (4, 20)], window=window, kv_heads=1)
    ancestors = forest(4, 4, before=8)
    result = attended(case, planned(case, small=True, ancestors=ancestors, before=8, tuning=TUNING))
    torch.testing.assert_close(result.double(), expected(case, ancestors, 8), rtol=1e-5, atol=1e-5)


def test_queries_may_lie_between_keys_and_values():
    case = make_case([(3, 50)])
    wide = torch.randn(3, 10, 16)
    wide[:, 2:6] = case.query
    check(replace(case, query=wide[:, 2:6]))


def test_what_the_plan_is_not_for_is_refused():
    case = make_case([(3, 50)])
    plan = planned(case, small=True, tuning=TUNING)
    with pytest.raises(
        ValueError, match=r"query is \[2, 4, 16\], of 2 KV heads; the plan is for 3 tokens, and 2 heads"
    ):
        attended(replace(case, query=case.query[:2]), plan)
    with pytest.raises(ValueError, match="contiguous"):
        attended(replace(case, query=case.query.transpose(0, 1).contiguous().transpose(0, 1)), plan)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_tiles_are_cut_to_a_gpu_s_shared_memory_and_stay_where_there_is_a_hopper_s(tokens, dim):
    tuning = attention.tuning_for(torch.bfloat16, dim, tokens)
    for tile in (tuning.narrow, tuning.small, tuning.large):
        assert tile.within(HOPPER, dim, 2) == tile
        for limit in (163 << 10, 99 << 10, 48 << 10):
            cut = tile.within(limit, dim, 2)
            assert (cut.rows + 2 * cut.stages * cut.keys) * dim * 2 <= limit
            assert min(cut.rows, cut.keys) >= 16
