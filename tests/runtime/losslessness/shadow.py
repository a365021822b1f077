"""What an engine's KV holds and its draft reads, beside the same texts computed alone, whole, with nothing kept.

A text without speculation shows no fault of the draft's state: a draft that reads what it should not is only accepted
less often. So here every position that counts as written is compared; and whatever does not count is spoilt after each
step, so that a draft that reads it draws from other states than it should.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from tests.runtime.batches import Span, make_batch
from tests.runtime.engine.driver import MAX_MODEL_LEN
from tests.runtime.losslessness.plain import everything, plain
from tests.runtime.methods import METHODS
from tests.runtime.tiny import ours, reference_model
from torch import Tensor

from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.request import Request
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.kv.prefix import extend_chain
from outrider_runtime.models.causal import CausalLM, Weighted
from outrider_runtime.models.eagle import EagleHead
from outrider_runtime.models.medusa import MedusaHeads

ROUNDING = 1e-9  # of float64


@dataclass(frozen=True)
class Whole:
    """Of a text: target's and draft's KV, [layers, 2, tokens, heads, dim], and what the draft draws its first token
    from behind the text up to each token, [tokens, hidden]; None where it has none. It begins at `first`."""

    kv: Tensor
    draft_kv: Tensor | None = None
    states: Tensor | None = None
    first: int = 0


class Shadow:
    """Of all engines of a method, whose requests are from everything()."""

    def __init__(self, method: str) -> None:
        self._target = ours(reference_model(), torch.float64)
        self._draft = METHODS[method].draft(self._target)
        if isinstance(self._draft, EagleHead):
            self._draft.attach(self._target, MAX_MODEL_LEN)
        self._texts = [[*each.prompt, *text.token_ids] for each, text in zip(everything(), plain(), strict=True)]
        self._whole: dict[int, Whole] = {}
        self._seen: dict[tuple[int, int, int], Tensor] = {}  # what was drawn from: of a text, to its token, in a turn

    def watch(self, engine: Engine, lots: random.Random) -> Watch:
        return Watch(self, engine, lots)

    def text(self, request: Request) -> tuple[int, list[int]]:
        number = int(request.request_id.split()[-1])
        return number, self._texts[number]

    def whole(self, number: int) -> Whole:
        if number not in self._whole:
            self._whole[number] = self._read(self._texts[number])
        return self._whole[number]

    @cached_property
    def origins(self) -> dict[tuple[int, bytes], tuple[int, int]]:
        """A text and an index in it of each block that there may be, by its size and digest."""
        found = {}
        for size in (1, 4, 16):
            for number, text in enumerate(self._texts):
                chain: list[bytes] = []
                extend_chain(chain, text, size, len(text))
                found |= {(size, digest): (number, index) for index, digest in enumerate(chain)}
        return found

    def drawn(self, number: int, end: int, turn: int, states: Tensor) -> None:
        """By the draft, behind that text of `end` tokens and its drafts of the turns before."""
        expected = self.whole(number).states
        assert expected is not None
        known = expected[end - 1 : end] if turn == 0 else self._seen.setdefault((number, end, turn), states.clone())
        assert _far(states, known) < ROUNDING, f"in turn {turn} the draft draws from what is not text {number}'s"

    def _read(self, text: list[int]) -> Whole:
        kv, hidden = _alone(self._target, text)
        if isinstance(self._draft, EagleHead):
            cache = _cache(self._draft)
            states = self._draft.states(hidden)[:-1].clone()
            batch = make_batch([Span(text[1:], 1, _BLOCKS)], 1, "cpu", self._draft.attention_shape)
            states = self._draft(batch, states, cache)
            return Whole(kv, cache.arrays[:, :, : len(text)], torch.cat((states[:1], states)), first=1)
        if isinstance(self._draft, MedusaHeads):
            states = self._draft.states(hidden, 1)[0]
            return Whole(kv, None, torch.cat((states[:1], states[:-1])))
        if isinstance(self._draft, CausalLM):
            return Whole(kv, *_alone(self._draft, text))
        return Whole(kv)


class Watch:
    """Of one engine."""

    def __init__(self, shadow: Shadow, engine: Engine, lots: random.Random) -> None:
        self._shadow, self._engine, self._lots = shadow, engine, lots
        self._runner, self._size = engine._runner, engine.config.cache.block_size
        proposer = self._runner.proposer
        self._draft_cache: KVCache | None = getattr(proposer, "_cache", None)
        self._model: Weighted | None = next(
            (getattr(proposer, name) for name in ("_model", "_head", "_heads") if hasattr(proposer, name)), None
        )
        self._loops: dict[int, int] = {}  # how far the last one read that a slot's request had
        if proposer is not None and self._model is not None:
            self._drafting, proposer.draft = proposer.draft, self._draft

    def check(self) -> None:
        """After a step: blocks are whole; what counts as written is right, and the rest is never to be read."""
        self._check_blocks()
        running, pool = self._engine._scheduler.running, self._engine._prefixes
        kept, draft_kept = (torch.zeros(self._runner._cache.nowhere, dtype=torch.bool) for _ in range(2))
        for request in running:
            number, text = self._shadow.text(request)
            whole, standing = self._shadow.whole(number), self._standing(request)
            slots = self._slots(request.blocks)
            computed = slots[: standing - 1 if request.pending == 1 else standing]
            kept[computed] = True
            _assert_holds(self._runner._cache, computed[: len(text)], whole.kv, f"text {number}'s KV")
            if self._draft_cache is not None:
                assert whole.draft_kv is not None
                followed = slots[: self._followed(request, standing)]
                draft_kept[followed] = True
                told = f"text {number}'s KV of the draft"
                _assert_holds(self._draft_cache, followed[: len(text)], whole.draft_kv, told, whole.first)
        kept[self._slots(pool._digest_of)] = True
        draft_kept[self._slots(pool._draft_valid)] = True
        for cache, keeps in ((self._runner._cache, kept), (self._draft_cache, draft_kept)):
            if cache is not None:
                cache.arrays[:, :, : cache.nowhere][:, :, ~keeps] = self._lots.uniform(-9.0, 9.0)

    def check_published(self) -> None:
        """What later requests may take over."""
        prefixes = self._engine._prefixes
        assert prefixes._draft_valid <= prefixes._digest_of.keys()
        for block, digest in prefixes._digest_of.items():
            assert (self._size, digest) in self._shadow.origins, "a block is published that is of no text"
            number, index = self._shadow.origins[self._size, digest]
            whole, part = self._shadow.whole(number), slice(index * self._size, (index + 1) * self._size)
            slots = self._slots([block])
            _assert_holds(self._runner._cache, slots, whole.kv[:, :, part], "a published block")
            if block in prefixes._draft_valid and self._draft_cache is not None:
                assert whole.draft_kv is not None
                first = max(0, whole.first - part.start)
                _assert_holds(self._draft_cache, slots, whole.draft_kv[:, :, part], "a block of the draft's", first)

    def _check_blocks(self) -> None:
        """Each is free, or kept, or somebody's, and counted as often as it is had."""
        pool = self._engine._prefixes.pool
        had = Counter(block for request in self._engine._scheduler.running for block in request.blocks)
        assert sorted([*pool._free, *pool._cached, *had]) == list(range(pool.num_blocks)), "a block is lost"
        assert all(pool.refs(block) == had[block] for block in range(pool.num_blocks))

    def _standing(self, request: Request) -> int:
        """Tokens of its text that are read, or generated: the device knows them before the host does."""
        if request.pending == 1:
            return int(self._runner._state.lengths[request.slot])
        return len(request.tokens) - request.pending

    def _followed(self, request: Request, standing: int) -> int:
        """Of them, those whose KV the draft counts on."""
        if request.flight is None:
            return request.draft_computed
        if self._runner.proposer is not None and self._runner.proposer.extends:
            return standing if request.draft_computed >= request.shortest else request.draft_computed
        if request.flight.draft_length > 0:  # the last draft is read only if there is another behind it
            return min(standing - 1, self._loops[request.slot])
        return request.draft_computed

    def _draft(self, feed, requests, length, mode):
        assert self._model is not None
        state, slots = self._runner._state, feed.slots[:requests].tolist()
        ends = [int(state.lengths[slot]) for slot in slots]
        with _drawn_from(self._model) as turns:
            self._drafting(feed, requests, length, mode)
        running = {request.slot: request for request in self._engine._scheduler.running}
        for row, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            number, text = self._shadow.text(running[slot])
            self._loops[slot] = end + int(feed.drafts[row]) - 1
            if end > len(text):
                continue  # it is cut when the host learns of it
            # What has no place for its KV cannot stand, and turns that others need do not count.
            needed = bisect_left(self._runner.draft_sizes, min(int(feed.drafts[row]), int(feed.capacities[row]) - end))
            for turn, states in enumerate(turns[:needed]):
                self._shadow.drawn(number, end, turn, states.unflatten(0, (requests, -1))[row])
            if self._runner.proposer.extends:
                self._guess(slot, text[end:], int(feed.drafts[row]), end)

    def _guess(self, slot: int, rest: list[int], drafts: int, end: int) -> None:
        """Let one of the drafts, and those that it follows, be right: heads of random weights seldom are."""
        state, node, path = self._runner._state, self._lots.randint(0, drafts), list[int]()
        while node > 0:
            path.insert(0, node)
            node = node - 1 if self._runner.proposer.tree is None else int(state.parents[slot, node - 1])
        for node, token in zip(path, rest, strict=False):
            state.tokens[slot, end + node - 1] = token

    def _slots(self, blocks) -> Tensor:
        first = torch.tensor([block * self._size for block in blocks], dtype=torch.int64)
        return (first.unsqueeze(1) + torch.arange(self._size)).flatten()


_BLOCKS = range(MAX_MODEL_LEN)  # of one token


def _cache(model: CausalLM | EagleHead) -> KVCache:
    return KVCache(model.config, MAX_MODEL_LEN, 1, torch.float64, "cpu")


def _alone(model: CausalLM, text: list[int]) -> tuple[Tensor, Tensor]:
    """KV and hidden states."""
    cache = _cache(model)
    hidden = model(make_batch([Span(text, 0, _BLOCKS)], 1, "cpu", model.attention_shape), cache)
    return cache.arrays[:, :, : len(text)], hidden


@contextmanager
def _drawn_from(model: Weighted) -> Iterator[list[Tensor]]:
    """The states of which logits are made meanwhile."""
    seen: list[Tensor] = []
    logits = model.logits

    def recorded(*arguments):
        seen.append(arguments[-1].clone())
        return logits(*arguments)

    model.logits = recorded
    try:
        yield seen
    finally:
        del model.logits


def _assert_holds(cache: KVCache, slots: Tensor, kv: Tensor, told: str, first: int = 0) -> None:
    """In `slots`, in order, from the `first` on, what `kv` has."""
    found = cache.arrays[:, :, slots[first:]]
    if found.numel():
        wrong = (found - kv[:, :, first : len(slots)]).abs().amax((0, 1, 3, 4)) > ROUNDING
        assert not wrong.any(), f"{told} is not what it should be at {(first + wrong.nonzero().flatten()).tolist()}"


def _far(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
