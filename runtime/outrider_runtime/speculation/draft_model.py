"""Drafts from a smaller model of the same vocabulary, over the target's block tables, with the target's noise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider_runtime.engine.request import Request
from outrider_runtime.engine.scheduler import Chunk
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.batch import Span, make_batch
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.sampling.pipeline import Row, sample

# Positions worth reading to catch up, for each token the request may still generate: one read in a chunk costs a
# hundredth of a decoded one, of which drafting saves about half.
CATCH_UP_PER_TOKEN = 50


@dataclass(frozen=True, slots=True)
class _Reading:
    """Tokens the draft has yet to read, up to where the target will be; and how many to draft once it has."""

    chunk: Chunk
    length: int
    draft_length: int


class DraftModel:
    name = "draft-model"

    def __init__(
        self,
        model: LlamaForCausalLM,
        cache: KVCache,
        vocab_size: int,
        max_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
    ) -> None:
        """`vocab_size` is the target's: the two may be padded differently, and only shared ids are drafted."""
        self._model = model
        self._cache = cache
        self._vocab_size = min(vocab_size, model.config.vocab_size)
        self._max_batched_tokens = max_batched_tokens
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._written: dict[str, int] = {}  # how far each request's draft KV reaches, drafted tokens included

    def propose(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        readings = self._readings(chunks)
        drafts: dict[str, list[int]] = {}
        if readings:
            hidden = self._read(readings)
            drafting = [reading for reading in readings if reading.draft_length > 0]
            if drafting:
                drafts = self._draft(drafting, hidden)
        return [drafts.get(chunk.request.request_id, []) for chunk in chunks]

    def observe(self, requests: Sequence[Request]) -> None:
        """KV of drafts that were rejected does not count."""
        for request in requests:
            written = self._written.pop(request.request_id, request.draft_computed)
            request.draft_computed = min(written, request.computed)

    def forget(self, request: Request) -> None:
        self._written.pop(request.request_id, None)

    def _readings(self, chunks: Sequence[Chunk]) -> list[_Reading]:
        """What to read this step within the token budget, those first that are nearly there."""
        limit = self._model.config.max_position_embeddings
        readings = []
        budget = self._max_batched_tokens
        for chunk in sorted(chunks, key=lambda chunk: chunk.end - chunk.request.draft_computed):
            request = chunk.request
            length = min(chunk.end - request.draft_computed, budget)
            if request.params.speculative == 0 or length <= 0 or chunk.end > limit or not self._repays(chunk):
                continue
            budget -= length
            ready = request.draft_computed + length == chunk.end
            readings.append(_Reading(chunk, length, min(chunk.draft_length, limit - chunk.end) if ready else 0))
        # Longest drafts first, so that those still drafting are always the first rows.
        return sorted(readings, key=lambda reading: -reading.draft_length)

    def _repays(self, chunk: Chunk) -> bool:
        missed = chunk.start - 1 - chunk.request.draft_computed  # one behind is where an accepted draft leaves it
        return missed <= CATCH_UP_PER_TOKEN * chunk.request.room(self._max_model_len) if missed > 0 else True

    def _read(self, readings: Sequence[_Reading]) -> Tensor:
        """Write the draft's KV for all of them; the hidden state of each one's last token, [readings, hidden]."""
        spans = []
        for reading in readings:
            request, start = reading.chunk.request, reading.chunk.request.draft_computed
            spans.append(Span(request.tokens[start : start + reading.length], start, request.blocks))
            self._written[request.request_id] = start + reading.length
        lengths = torch.tensor([reading.length for reading in readings], device=self._model.device)
        return self._forward(spans)[lengths.cumsum(0) - 1]

    def _draft(self, drafting: Sequence[_Reading], hidden: Tensor) -> dict[str, list[int]]:
        """Draw and feed back, one token a turn for all that still draft."""
        drafted: list[list[int]] = [[] for _ in drafting]
        while True:
            turn = len(drafted[0])
            members = [reading for reading in drafting if reading.draft_length > turn]
            tokens = self._draw(members, drafted, hidden).tolist()
            for own, token in zip(drafted, tokens, strict=False):
                own.append(token)
            members = [reading for reading in members if reading.draft_length > turn + 1]
            if not members:
                return {reading.chunk.request.request_id: own for reading, own in zip(drafting, drafted, strict=True)}
            spans = [
                Span(own[-1:], reading.chunk.end + turn, reading.chunk.request.blocks)
                for reading, own in zip(members, drafted, strict=False)
            ]
            for reading, span in zip(members, spans, strict=True):
                self._written[reading.chunk.request.request_id] = span.end
            hidden = self._forward(spans)

    def _draw(self, members: Sequence[_Reading], drafted: Sequence[Sequence[int]], hidden: Tensor) -> Tensor:
        rows = [
            Row(request.params, request.seed, request.tokens, request.prompt_length, own)
            for request, own in zip((reading.chunk.request for reading in members), drafted, strict=False)
        ]
        logits = self._model.logits(hidden[: len(members)])[:, : self._vocab_size]
        return sample(logits, rows, self._eos_token_ids)

    def _forward(self, spans: Sequence[Span]) -> Tensor:
        batch = make_batch(spans, self._cache.block_size, self._model.device, self._model.attention_shape)
        known = batch.token_ids.clamp(max=self._model.config.vocab_size - 1)  # ids beyond are the target's padding
        hidden: Tensor = self._model(replace(batch, token_ids=known), self._cache)
        return hidden
