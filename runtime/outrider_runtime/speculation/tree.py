"""Shapes of draft trees. A tree's tokens are numbered as they lie behind the text: the text's last token, which all
branches grow from, is 0, the drafts are 1 and up, parents before their children.

So any first few of a tree's tokens are a tree, and a chain is the tree in which everyone's parent is the one before.
How much is drafted is said in turns, each of which goes a token deeper; `sizes` tells how many drafts that makes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from outrider_runtime.config import MOST_TREE_TOKENS

# A guess at how often the likeliest token of the next position is right, what is left of that a position on, and what
# each next rank gets of the one before: it shapes trees of methods that know no confidence before they draft.
FIRST, FADE, NEXT_RANK = 0.7, 0.9, 0.35


class TreeError(ValueError):
    """What is wrong with a tree, and what would be right."""


class Tree(Protocol):
    @property
    def depth(self) -> int:
        """The most turns."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Drafts after so many turns, from 0 to depth."""
        ...


@dataclass(frozen=True)
class StaticTree:
    """The same for every request and step: which rank of which position's candidates each draft is (Medusa, Cai et
    al., arXiv 2401.10774). All in the order of the drafts, which is that of their depths."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]  # 1 and up
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, choices: Sequence[Sequence[int]]) -> StaticTree:
        """From the paths to all drafts, in any order: the ranks chosen at each position, as in Medusa's
        `medusa_choices`.

        Raises TreeError for a path that is there twice, or without the one that it extends.
        """
        if not 0 < len(choices) <= MOST_TREE_TOKENS:
            raise TreeError(f"a tree has 1 to {MOST_TREE_TOKENS} drafts; got {len(choices)}")
        paths = sorted(map(tuple, choices), key=len)
        numbers: dict[tuple[int, ...], int] = {(): 0}
        parents = []
        for path in paths:
            if not path or path in numbers:
                raise TreeError(f"path {list(path)} is there twice" if path else "a path must not be empty")
            if path[:-1] not in numbers:
                raise TreeError(f"path {list(path)} is there without {list(path[:-1])}, which it extends")
            parents.append(numbers[path[:-1]])
            numbers[path] = len(numbers)
        return cls(tuple(parents), tuple(map(len, paths)), tuple(path[-1] for path in paths))

    @cached_property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def top_k(self) -> int:
        """How many candidates of a position are drafted at most."""
        return 1 + max(self.ranks)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(depth <= turns for depth in self.depths) for turns in range(self.depth + 1))


def likely_choices(depth: int, top_k: int, max_tokens: int) -> list[tuple[int, ...]]:
    """The `max_tokens` paths, of ranks below `top_k`, that are right most often by the guess above; best first."""
    choices: list[tuple[int, ...]] = []
    paths: list[tuple[float, tuple[int, ...]]] = [(-FIRST, (0,))]
    while paths and len(choices) < max_tokens:
        worth, path = heapq.heappop(paths)
        choices.append(path)
        if path[-1] + 1 < top_k:
            heapq.heappush(paths, (worth * NEXT_RANK, (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(paths, (worth * FIRST * FADE ** len(path), (*path, 0)))
    return choices


class Layout:
    """A static tree's indices, on the device."""

    def __init__(self, tree: StaticTree, device: torch.device | str) -> None:
        self.tree = tree
        self._parents = torch.tensor(tree.parents, dtype=torch.int32, device=device)
        self._depths = torch.tensor(tree.depths, device=device) - 1
        self._ranks = torch.tensor(tree.ranks, device=device)
        # The likeliest of each position, and for the rest any: what is verified of a chain is at most its depth.
        self._chain = torch.arange(len(tree.parents), dtype=torch.int32, device=device)
        self._chain_depths = self._chain.long().clamp(max=tree.depth - 1)

    def drafts(self, candidates: Tensor, chains: Tensor) -> tuple[Tensor, Tensor]:
        """Of [requests, turns, top_k] candidates the drafts and their parents, [requests, sizes[turns]] int32 each.

        `chains` [requests] bool: these get the likeliest token of each position, one behind the other.
        """
        turns = candidates.shape[1]
        size = self.tree.sizes[turns]
        tree = candidates[:, self._depths[:size], self._ranks[:size]]
        chain = candidates[:, self._chain_depths[:size].clamp(max=turns - 1), 0]
        alone = chains.unsqueeze(1)
        parents = torch.where(alone, self._chain[:size], self._parents[:size])
        return torch.where(alone, chain, tree).to(torch.int32), parents
