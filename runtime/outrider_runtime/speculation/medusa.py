"""Drafts from Medusa heads: each its own token ahead, all from the target's hidden state before a text's last token."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.follow import text_ends
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.engine.tree_step import place_trees
from outrider_runtime.layers.rows import take_rows
from outrider_runtime.models.causal import CausalLM
from outrider_runtime.models.medusa import MedusaHeads
from outrider_runtime.sampling.candidates import candidates
from outrider_runtime.sampling.sampler import draft
from outrider_runtime.sampling.table import Mode, SamplingTable, Settings
from outrider_runtime.speculation.cost import ModelShape
from outrider_runtime.speculation.following import Following
from outrider_runtime.speculation.tree import Layout, StaticTree


class Medusa(Following):
    name = "medusa"

    def __init__(
        self,
        heads: MedusaHeads,
        target: CausalLM,
        state: DeviceState,
        table: SamplingTable,
        tree: StaticTree | None = None,
    ) -> None:
        """`tree` is at most as deep as there are heads."""
        self._heads, self._state, self._table = heads, state, table
        self._vocab_size = target.config.vocab_size
        self.longest = heads.shape.heads
        self.tree = tree
        self._layout = None if tree is None else Layout(tree, target.device)
        size, outputs = heads.config.hidden_size, heads.config.vocab_size
        self.shape = ModelShape(heads.shape.blocks * size * size, outputs * size, 0.0, heads.dtype.itemsize)
        # The target's, of each slot, at the position before its text's last token
        self._hidden = torch.zeros(state.nobody + 1, size, dtype=target.dtype, device=target.device)

    def due(self, now: float, *, allowed: bool, pays: bool) -> bool:
        """Whether it pays or not: what it keeps is a copy."""
        return super().due(now, allowed=allowed, pays=True)

    def extend(self, feed: Feed, hidden: Tensor, positions: Tensor, *, small: bool) -> None:
        self._hidden.index_copy_(0, text_ends(self._state, feed, positions), hidden)

    def draft(self, feed: Feed, requests: int, length: int, mode: Mode) -> None:
        slots = feed.slots[:requests]
        ends = self._state.lengths[slots]
        if self._layout is not None:
            self._draft_trees(self._layout, slots, ends, length, mode)
            return
        count = min(length, self.longest)
        for head, states in enumerate(self._heads.states(take_rows(self._hidden, slots), count)):
            draft(self._logits(head, states), slots, ends + head, self._table, mode)

    def _logits(self, head: int, states: Tensor) -> Tensor:
        """[rows, vocab]: the heads' table may be padded further than the target's."""
        return self._heads.logits(head, states)[:, : self._vocab_size]

    def _draft_trees(self, layout: Layout, slots: Tensor, ends: Tensor, length: int, mode: Mode) -> None:
        """The heads know nothing of each other: each one's candidates are those of all branches."""
        tree = layout.tree
        states = self._heads.states(self._hidden[slots], min(length, tree.depth))
        found = [
            candidates(self._logits(head, each), slots, ends + head, self._table, mode, tree.top_k)[0]
            for head, each in enumerate(states)
        ]
        chains = Settings(self._table.rows[slots]).reads_text
        place_trees(self._state, slots, ends, *layout.drafts(torch.stack(found, dim=1), chains))
