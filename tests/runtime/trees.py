"""Random draft trees, and what they mean, in plain Python."""

from __future__ import annotations

import random
from collections.abc import Sequence


def random_tree(lots: random.Random, tokens: int, depth: int) -> list[int]:
    """The parents of so many drafts, none deeper than `depth`; 0 is the text's last token."""
    depths = [0]
    parents = []
    for number in range(1, tokens + 1):
        parent = lots.choice([each for each in range(number) if depths[each] < depth])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def branch(parents: Sequence[int], number: int) -> list[int]:
    """From 0 to it."""
    return [0] if number == 0 else [*branch(parents, parents[number - 1]), number]


def mask(parents: Sequence[int], number: int) -> int:
    """Its branch, a bit each, as an int64 holds them."""
    bits = sum(1 << each for each in branch(parents, number))
    return bits - (1 << 64) if bits >> 63 else bits


def walked(parents: Sequence[int], drafts: Sequence[int], target: Sequence[int], places: int) -> list[int]:
    """Which drafts stand: `target` is drawn behind each of the tree's tokens, and the first `places` have KV."""
    path, number = [], 0
    while True:
        following = [
            each
            for each, (parent, draft) in enumerate(zip(parents, drafts, strict=True), start=1)
            if parent == number and draft == target[number] and each <= places
        ]
        if not following:
            return path
        number = following[0]
        path.append(number)
