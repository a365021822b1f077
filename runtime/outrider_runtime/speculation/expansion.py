"""Trees that grow where the draft is confident (EAGLE-2, Li et al., arXiv 2406.16858), on the device.

Each turn the draft reads a frontier of top_k tokens, each of which proposes top_k that may follow; the best of these
by joint confidence are the next frontier. What is drafted in the end are the best of all that were proposed. Shapes
are fixed and nothing is looked at from the host, so that the whole is one CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_runtime.config import tree_fault
from outrider_runtime.speculation.tree import TreeError


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """At most `max_tokens` drafts, `depth` behind each other, from `top_k` tokens read at once. Raises TreeError."""

    top_k: int
    depth: int
    max_tokens: int

    def __post_init__(self) -> None:
        if fault := tree_fault(self.top_k, self.depth, self.max_tokens):
            raise TreeError(fault)

    @property
    def sizes(self) -> tuple[int, ...]:
        proposed = (self.top_k * (1 + (turns - 1) * self.top_k) for turns in range(1, self.depth + 1))
        return (0, *(min(self.max_tokens, each) for each in proposed))


@dataclass(frozen=True, slots=True)
class Frontier:
    """What the draft reads next, for n requests: their KV lies behind each other, behind the last frontier's."""

    tokens: Tensor  # [n, top_k] int32
    sources: Tensor  # [n, top_k] int64, which token of the last frontier each follows
    ancestors: Tensor  # [n, top_k] int64, a bit for each token read since the text's end, itself included


class Expansion:
    """One step's trees of n requests, while they grow."""

    def __init__(self, tree: DynamicTree, chains: Tensor) -> None:
        """`chains` [n] bool: these get the likeliest token of each turn, one behind the other."""
        self._tree = tree
        self._alone = chains.view(-1, 1, 1)
        # The frontier: joint confidence, own number among the candidates (the root is -1) and ancestors.
        self._joint = torch.zeros(len(chains), 1, dtype=torch.float32, device=chains.device)
        self._numbers = torch.full((len(chains), 1), -1, dtype=torch.int64, device=chains.device)
        self._ancestors = torch.zeros_like(self._numbers)
        # Of every candidate so far
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []

    def grow(self, tokens: Tensor, confidences: Tensor) -> Frontier:
        """Takes what follows each token of the frontier, the text's end at first: [n, 1 or top_k, top_k] tokens, the
        likeliest first, and their log-confidences."""
        top_k, turn = self._tree.top_k, len(self._tokens)
        ranks = torch.arange(top_k, device=tokens.device)
        confidences = confidences.to(torch.float32).masked_fill(self._alone & (ranks > 0), -torch.inf)
        joint = (self._joint.unsqueeze(2) + confidences).flatten(1)
        first = 0 if turn == 0 else top_k + (turn - 1) * top_k**2
        self._tokens.append(tokens.flatten(1))
        self._scores.append(joint)
        self._parents.append(self._numbers.repeat_interleave(top_k, dim=1))
        self._joint, best = joint.topk(top_k)
        self._numbers = first + best
        sources = best // top_k
        self._ancestors = self._ancestors.gather(1, sources) | (1 << (turn * top_k + ranks))
        return Frontier(self._tokens[-1].gather(1, best).to(torch.int32), sources, self._ancestors)

    def best(self) -> tuple[Tensor, Tensor]:
        """The drafts and their parents, [n, tree.sizes[turns]] int32 each, numbered as tree.py says.

        Confidences are at most 0, so none is more confident than its parent, which has the lower number: sorted by
        both, parents come first, and no draft is without its own.
        """
        scores, tokens, parents = (torch.cat(each, dim=1) for each in (self._scores, self._tokens, self._parents))
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self._tree.max_tokens]
        places = torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
        numbers = torch.zeros_like(parents).scatter(1, order, places)
        parents = parents.gather(1, order)
        parents = torch.where(parents < 0, 0, numbers.gather(1, parents.clamp(min=0)))
        return tokens.gather(1, order).to(torch.int32), parents.to(torch.int32)
