"""Static trees say, for each draft, whose child it is and which candidate of which position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider_runtime.config import MOST_TREE_TOKENS
from outrider_runtime.speculation.tree import Layout, StaticTree, TreeError, likely_choices

CHOICES = [(0,), (0, 0), (0, 0, 0), (1,), (0, 2), (1, 0)]


def test_a_tree_of_choices():
    tree = StaticTree.of(CHOICES)
    assert tree.parents == (0, 0, 1, 1, 2, 3)
    assert tree.depths == (1, 1, 2, 2, 2, 3)
    assert tree.ranks == (0, 1, 0, 2, 0, 0)
    assert (tree.depth, tree.top_k) == (3, 3)
    assert tree.sizes == (0, 2, 5, 6)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "a tree has 1 to 63 drafts; got 0"),
        ([(rank,) for rank in range(64)], "a tree has 1 to 63 drafts; got 64"),
        ([(0,), (0,)], r"path \[0\] is there twice"),
        ([(0,), ()], "a path must not be empty"),
        ([(0,), (1, 0)], r"path \[1, 0\] is there without \[1\], which it extends"),
    ],
)
def test_what_is_no_tree_is_refused(choices, message):
    with pytest.raises(TreeError, match=message):
        StaticTree.of(choices)


@given(depth=st.integers(1, 6), top_k=st.integers(1, 8), max_tokens=st.integers(1, MOST_TREE_TOKENS))
def test_likely_choices_are_a_tree(depth, top_k, max_tokens):
    choices = likely_choices(depth, top_k, max_tokens)
    tree = StaticTree.of(choices)
    assert tree.depth <= depth
    assert tree.top_k <= top_k
    assert len(choices) == min(max_tokens, sum(top_k**turn for turn in range(1, depth + 1)))
    assert choices[0] == (0,)


def test_without_siblings_it_is_a_chain():
    assert StaticTree.of(likely_choices(4, 1, 9)).parents == (0, 1, 2, 3)


def test_more_tokens_go_to_the_side_as_well_as_down():
    tree = StaticTree.of(likely_choices(5, 8, 26))
    assert tree.depth == 5
    assert tree.top_k >= 3


def test_candidates_are_laid_out_and_chains_take_the_likeliest():
    layout = Layout(StaticTree.of(CHOICES), "cpu")
    candidates = torch.arange(2 * 3 * 3).view(2, 3, 3)  # token = request * 9 + position * 3 + rank
    drafts, parents = layout.drafts(candidates, torch.tensor([False, True]))
    assert drafts[0].tolist() == [0, 1, 3, 5, 3, 6]
    assert parents[0].tolist() == [0, 0, 1, 1, 2, 3]
    assert drafts[1, :3].tolist() == [9, 12, 15]
    assert parents[1].tolist() == [0, 1, 2, 3, 4, 5]


def test_fewer_turns_draft_the_tree_down_to_there():
    layout = Layout(StaticTree.of(CHOICES), "cpu")
    drafts, parents = layout.drafts(torch.arange(2 * 2 * 3).view(2, 2, 3), torch.tensor([False, True]))
    assert drafts[0].tolist() == [0, 1, 3, 5, 3]
    assert parents[0].tolist() == [0, 0, 1, 1, 2]
    assert drafts[1, :2].tolist() == [6, 9]
