"""A tree grows where the draft is confident, as the same search does in plain Python."""

from __future__ import annotations

import heapq
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider_runtime.speculation.expansion import DynamicTree, Expansion
from outrider_runtime.speculation.tree import TreeError

VOCAB = 11

shapes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 20)).map(
    lambda each: DynamicTree(each[0], each[1], _between(each[0], each[1], each[2]))
)


def _between(top_k: int, depth: int, more: int) -> int:
    reach = (depth - 1) * top_k
    return max(1, reach) + more


def draft(path: tuple[int, ...], seed: int) -> torch.Tensor:
    """What a draft thinks of what follows: log-probabilities by the whole branch."""
    generator = torch.Generator().manual_seed(hash((path, seed)) & 0x7FFFFFFF)
    return (3 * torch.randn(VOCAB, generator=generator)).log_softmax(-1)


def searched(tree: DynamicTree, seed: int, *, chain: bool) -> list[tuple[int, ...]]:
    """The paths of the best drafts, best first."""
    frontier, found = [((), 0.0)], []
    for _ in range(tree.depth):
        proposed = []
        for path, joint in frontier:
            best = draft(path, seed).topk(1 if chain else tree.top_k)
            proposed += [
                ((*path, token), joint + score)
                for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        frontier = heapq.nlargest(tree.top_k, proposed, key=lambda each: each[1])
        found += proposed
    return [path for path, _ in heapq.nlargest(tree.max_tokens, found, key=lambda each: each[1])]


def grown(tree: DynamicTree, seeds: list[int], chains: list[bool]) -> list[list[tuple[int, ...]]]:
    expansion = Expansion(tree, torch.tensor(chains))
    paths = [[()] for _ in seeds]
    for turn in range(tree.depth):
        proposals = [
            torch.stack([draft(path, seed) for path in own]).topk(tree.top_k)
            for own, seed in zip(paths, seeds, strict=True)
        ]
        tokens = torch.stack([each.indices for each in proposals]).to(torch.int32)
        frontier = expansion.grow(tokens, torch.stack([each.values for each in proposals]))
        for row, own in enumerate(paths):
            follows = zip(frontier.sources[row].tolist(), frontier.tokens[row].tolist(), strict=True)
            paths[row] = [(*own[source], token) for source, token in follows]
            for rank, (path, bits) in enumerate(zip(paths[row], frontier.ancestors[row].tolist(), strict=True)):
                assert bits >> turn * tree.top_k == 1 << rank
                assert bin(bits).count("1") == len(path)
    drafts, parents = expansion.best()
    assert drafts.shape == parents.shape == (len(seeds), tree.sizes[-1])
    results = []
    for row in range(len(seeds)):
        branches: list[tuple[int, ...]] = [()]
        for token, parent in zip(drafts[row].tolist(), parents[row].tolist(), strict=True):
            assert parent < len(branches)  # parents come first
            branches.append((*branches[parent], token))
        results.append(branches[1:])
    return results


@given(tree=shapes, seed=st.integers(0, 99))
def test_the_best_drafts_are_those_of_a_search(tree, seed):
    ours = grown(tree, [seed, seed + 1], [False, True])
    assert ours[0] == searched(tree, seed, chain=False)
    chain = searched(tree, seed + 1, chain=True)
    assert ours[1][: len(chain)] == chain


def test_a_confident_draft_goes_deep_and_a_doubtful_one_wide():
    tree = DynamicTree(top_k=4, depth=4, max_tokens=12)
    ranks = torch.arange(4, dtype=torch.int32)
    deep = []
    for confidence in (0.97, 0.3):
        expansion = Expansion(tree, torch.tensor([False]))
        scores = torch.tensor([confidence, *[(1 - confidence) / 4] * 3]).log()
        for turn in range(tree.depth):
            width = 1 if turn == 0 else 4
            expansion.grow(ranks.expand(1, width, 4), scores.expand(1, width, 4))
        _, parents = expansion.best()
        depths = [0]
        for parent in parents[0].tolist():
            depths.append(depths[parent] + 1)
        deep.append(depths.count(4))
    assert deep[0] > deep[1]


def test_its_size_is_bounded_by_what_is_proposed_and_by_what_is_asked():
    assert DynamicTree(top_k=4, depth=4, max_tokens=25).sizes == (0, 4, 20, 25, 25)
    assert DynamicTree(top_k=2, depth=1, max_tokens=9).sizes == (0, 2)


def test_of_equals_parents_come_first():
    """A draft that is certain makes children exactly as confident as their parents."""
    tree = DynamicTree(top_k=2, depth=3, max_tokens=5)
    expansion = Expansion(tree, torch.tensor([False]))
    for width in (1, 2, 2):
        certain = torch.tensor([0.0, -math.inf]).expand(1, width, 2)
        expansion.grow(torch.zeros(1, width, 2, dtype=torch.int32), certain)
    _, parents = expansion.best()
    assert parents[0, :3].tolist() == [0, 1, 2]
    assert all(parent < number for number, parent in enumerate(parents[0].tolist(), start=1))


@pytest.mark.parametrize(
    ("top_k", "depth", "max_tokens", "message"),
    [
        (10, 5, 39, "a tree of 39 tokens; with 10 candidates .* 5 tokens behind each other it takes from 40.* to 63"),
        (10, 5, 64, "a tree of 64 tokens; .* to 63"),
    ],
)
def test_what_cannot_grow_is_refused(top_k, depth, max_tokens, message):
    with pytest.raises(TreeError, match=message):
        DynamicTree(top_k, depth, max_tokens)
