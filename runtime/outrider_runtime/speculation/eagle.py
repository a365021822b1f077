"""Drafts from an EAGLE head: from its state at a text's end, and then from its own states behind that.

After every step extend() gives it the target's hidden states of the step's tokens. They leave their KV; beyond that it
computes, having a single layer as a rule, only what is at texts' ends. What it computed from its own states of drafts
that stand is written over with that; what it wrote of others is never read, since a text's entries are those up to its
end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider_runtime.engine.device_step import draft_course
from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.follow import entry_batch
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.engine.tree_step import frontier_batch, place_trees
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.rows import take_rows
from outrider_runtime.models.causal import CausalLM
from outrider_runtime.models.eagle import EagleHead
from outrider_runtime.sampling.candidates import candidates
from outrider_runtime.sampling.sampler import draft
from outrider_runtime.sampling.table import Mode, SamplingTable, Settings
from outrider_runtime.speculation.cost import ModelShape
from outrider_runtime.speculation.expansion import DynamicTree, Expansion
from outrider_runtime.speculation.following import Following


class Eagle(Following):
    def __init__(
        self,
        head: EagleHead,
        target: CausalLM,
        cache: KVCache,
        state: DeviceState,
        table: SamplingTable,
        tokens: int,
        tree: DynamicTree | None = None,
    ) -> None:
        """For steps of up to `tokens`. Raises Refusal when the target does not give out what the head reads."""
        head.attach(target, tokens)
        self.name = "eagle3" if head.shape.version == 3 else "eagle"
        self.shape = _cost(head, target)
        self._head, self._cache, self._state, self._table = head, cache, state, table
        self._vocab_size = target.config.vocab_size
        self.tree = self._tree = tree
        self.taps = target.taps if head.shape.tapped else None
        # Of each slot, at its text's end
        self._states = torch.zeros(state.nobody + 1, head.config.hidden_size, dtype=head.dtype, device=head.device)

    def extend(self, feed: Feed, hidden: Tensor, positions: Tensor, *, small: bool) -> None:
        shape, several = self._head.attention_shape, len(self._head.layers) > 0
        batch, ends, owners = entry_batch(self._state, feed, self._cache, shape, positions, whole=several, small=small)
        states = self._head(batch, self._head.states(hidden), self._cache, ends)
        self._states.index_copy_(0, owners, states)

    def draft(self, feed: Feed, requests: int, length: int, mode: Mode) -> None:
        """Draw and feed back, one token a turn for all."""
        if self._tree is not None:
            self._draft_trees(self._tree, feed, requests, length, mode)
            return
        slots = feed.slots[:requests]
        course = draft_course(self._state, feed, self._cache, self._head.attention_shape, requests, length)
        rotations = self._head.rotations(course.positions)
        states = take_rows(self._states, slots)
        drawn = self._drawn(states, slots, course.positions[0], mode)
        for turn in range(1, length):
            batch = course.batch(turn - 1, drawn)
            states = self._head(batch, states, self._cache, rotation=rotations[turn - 1])
            drawn = self._drawn(states, slots, course.positions[turn], mode)

    def _drawn(self, states: Tensor, slots: Tensor, positions: Tensor, mode: Mode) -> Tensor:
        """[rows] tokens of the target's vocabulary."""
        logits, token_ids = self._logits(states, spread=mode is Mode.FULL)
        return draft(logits, slots, positions, self._table, mode, token_ids)

    def _logits(self, states: Tensor, *, spread: bool) -> tuple[Tensor, Tensor | None]:
        """[rows, vocab], and what ids they are of, if not the target's, of which the head may know a part: to `spread`
        them makes them the target's."""
        logits, token_ids = self._head.logits(states), self._head.token_ids
        if token_ids is None:
            return logits[:, : self._vocab_size], None
        if not spread:
            return logits, token_ids
        every = torch.full((len(logits), self._vocab_size), -torch.inf, dtype=logits.dtype, device=logits.device)
        return every.index_copy_(1, token_ids, logits), None

    def _draft_trees(self, tree: DynamicTree, feed: Feed, requests: int, turns: int, mode: Mode) -> None:
        """Each turn reads the likeliest branches there are, all requests' at once, and finds what may follow each."""
        slots = owners = feed.slots[:requests]
        branches = slots.repeat_interleave(tree.top_k)
        indices = slots.long()  # once, where indexing would for each tensor
        ends = positions = self._state.lengths[indices]
        states = take_rows(self._states, slots)
        expansion = Expansion(tree, Settings(self._table.rows[indices]).reads_text)
        for turn in range(turns):
            logits, token_ids = self._logits(states, spread=mode is not Mode.GREEDY)
            tokens, confidences = candidates(logits, owners, positions, self._table, mode, tree.top_k)
            tokens = tokens if token_ids is None else token_ids[tokens]
            frontier = expansion.grow(*(each.view(requests, -1, tree.top_k) for each in (tokens, confidences)))
            if turn + 1 < turns:
                sources = frontier.sources.unsqueeze(2).expand(-1, -1, states.shape[1])
                states = states.view(requests, -1, states.shape[1]).gather(1, sources).flatten(0, 1)
                shape = self._head.attention_shape
                batch, places = frontier_batch(self._state, feed, self._cache, shape, ends, frontier, turn)
                states = self._head(batch, states, self._cache)
                owners, positions = branches, places + 1
        place_trees(self._state, slots, ends, *expansion.best())


def _cost(head: EagleHead, target: CausalLM) -> ModelShape:
    config, itemsize = head.config, head.dtype.itemsize
    output = head.shape.head_rows or target.config.vocab_size
    loop = (head.first, head.layers, *((head.fc,) if head.shape.version == 1 else ()))
    body = sum(parameter.numel() for module in loop for parameter in module.parameters())
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    return ModelShape(body, output * config.hidden_size, kv, itemsize)
