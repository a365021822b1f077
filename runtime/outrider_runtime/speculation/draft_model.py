"""Drafts from a smaller model of the same vocabulary, over the target's block tables, with the target's noise.

Its first forward of a step reads a text's last two tokens: the last but one it has mostly read before, but not if it
was a draft that nothing was drafted behind. So the same forward serves whatever was accepted.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from outrider_runtime.engine.device_step import draft_course, gather_batch, tail_batch
from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.request import Request
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.batch import Batch
from outrider_runtime.models.causal import CausalLM
from outrider_runtime.sampling.sampler import draft
from outrider_runtime.sampling.table import Mode, SamplingTable
from outrider_runtime.speculation.cost import ModelShape
from outrider_runtime.speculation.proposer import Proposer

REREAD = 2  # tokens of the first forward


class DraftModel(Proposer):
    name = "draft-model"
    reads = True

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        state: DeviceState,
        table: SamplingTable,
        vocab_size: int,
    ) -> None:
        """`vocab_size` is the target's: the two may be padded differently, and only shared ids are drafted."""
        self._model = model
        self._cache = cache
        self._state = state
        self._table = table
        self._target_vocab_size = vocab_size
        self._vocab_size = min(vocab_size, model.config.vocab_size)
        self.reach = model.config.max_position_embeddings
        self.shape = ModelShape.of(model)

    def missed(self, request: Request) -> int:
        """But for those that the step's first forward reads anyway."""
        if request.flight is not None and request.flight.draft_length > 0:
            return 0  # it drafts there, so it has read
        return max(0, request.shortest - REREAD - request.draft_computed)

    def read(self, feed: Feed) -> None:
        batch = gather_batch(self._state, feed, self._cache, self._model.attention_shape, small=False)
        self._forward(batch)

    def draft(self, feed: Feed, requests: int, length: int, mode: Mode) -> None:
        """Draw and feed back, one token a turn for all."""
        slots, shape = feed.slots[:requests], self._model.attention_shape
        course = draft_course(self._state, feed, self._cache, shape, requests, length)
        tails = tail_batch(self._state, feed, self._cache, shape, course.positions[0], REREAD)
        drawn = self._drawn(self._forward(tails)[REREAD - 1 :: REREAD], slots, course.positions[0], mode)
        for turn in range(1, length):
            hidden = self._forward(course.batch(turn - 1, drawn))
            drawn = self._drawn(hidden, slots, course.positions[turn], mode)

    def observe(self, request: Request, end: int, drafted: int, accepted: int) -> None:
        """KV of drafts that were rejected does not count, and behind the last draft nothing was drafted."""
        if drafted > 0:
            request.draft_computed = min(end + accepted, end + drafted - 1)

    def _drawn(self, hidden: Tensor, slots: Tensor, positions: Tensor, mode: Mode) -> Tensor:
        logits = self._model.logits(hidden)[:, : self._vocab_size]
        return draft(logits, slots, positions, self._table, mode)

    def _forward(self, batch: Batch) -> Tensor:
        if self._vocab_size < self._target_vocab_size:  # ids beyond are the target's
            batch = replace(batch, token_ids=batch.token_ids.clamp(max=self._model.config.vocab_size - 1))
        hidden: Tensor = self._model(batch, self._cache)
        return hidden
