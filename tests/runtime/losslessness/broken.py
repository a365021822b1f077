"""Verifiers, noises and what a draft's state is held to be, each wrong in one way: what the checks must reject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider_runtime.engine import runner
from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.request import Request
from outrider_runtime.engine.scheduler import Chunk
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kv.compaction import Path, compact_rows
from outrider_runtime.kv.prefix import Digest, PrefixCache
from outrider_runtime.sampling import noise
from outrider_runtime.speculation import verify
from outrider_runtime.speculation.draft_model import DraftModel
from outrider_runtime.speculation.following import Following

Walk = Callable[[DeviceState, Feed, Tensor, Tensor, Tensor, Tensor | None], None]

walk, walk_tree, random_words = verify.walk, verify.walk_tree, noise.random_words


def accepts_one_too_many(
    state: DeviceState, feed: Feed, sampled: Tensor, meant: Tensor, results: Tensor, stands: Tensor | None
) -> None:
    before = state.tokens.clone(), state.lengths.clone()
    walk(state, feed, sampled, meant, results, stands)
    emitted = results[:, 0].clone()
    state.tokens.copy_(before[0])
    state.lengths.copy_(before[1])
    walk(state, feed, sampled, meant, results, torch.cat((emitted, emitted[:1])))  # one of them is the target's own


def accepts_all(
    state: DeviceState, feed: Feed, sampled: Tensor, meant: Tensor, results: Tensor, stands: Tensor | None
) -> None:
    walk(state, feed, sampled, meant, results, feed.drafts)


def emits_the_draft_that_differs(
    state: DeviceState, feed: Feed, sampled: Tensor, meant: Tensor, results: Tensor, stands: Tensor | None
) -> None:
    tokens, lengths, slots = state.tokens.clone(), state.lengths.clone(), feed.slots[:-1].long()
    walk(state, feed, sampled, meant, results, stands)
    accepted = (results[:, 0] - 1).clamp(min=0)
    places = lengths[slots] + accepted
    refused = (accepted < feed.drafts[:-1]) & (results[:, 0] > 0)
    draft = tokens[slots, places.long()]
    columns = (2 + accepted).long().unsqueeze(1)
    emitted = torch.where(refused, draft, results.gather(1, columns).squeeze(1))
    results.scatter_(1, columns, emitted.unsqueeze(1))
    state.tokens[slots[refused], places[refused].long()] = draft[refused]


def emits_the_token_behind_the_next_draft(
    state: DeviceState, feed: Feed, sampled: Tensor, meant: Tensor, results: Tensor, stands: Tensor | None
) -> None:
    """Looks one row too far."""
    walk(state, feed, sampled.roll(-1), meant, results, stands)


VERIFIERS: dict[str, Walk] = {
    "accepts one too many": accepts_one_too_many,
    "accepts all": accepts_all,
    "emits the draft that differs": emits_the_draft_that_differs,
    "emits the token behind the next draft": emits_the_token_behind_the_next_draft,
}


TreeWalk = Callable[[DeviceState, Feed, Tensor, Tensor, Tensor, Path, Tensor | None], None]


def accepts_the_first_branch(
    state: DeviceState, feed: Feed, sampled: Tensor, meant: Tensor, results: Tensor, path: Path, stands: Tensor | None
) -> None:
    walk_tree(state, feed, sampled, meant, results, path, feed.drafts)


def takes_the_row_of_a_sibling(
    state: DeviceState, feed: Feed, sampled: Tensor, meant: Tensor, results: Tensor, path: Path, stands: Tensor | None
) -> None:
    rows = sampled.clone()
    rows[2::4] = sampled[1::4]  # of trees of three drafts, the first two of them siblings
    walk_tree(state, feed, rows, meant, results, path, stands)


TREE_VERIFIERS: dict[str, TreeWalk] = {
    "accepts the first branch": accepts_the_first_branch,
    "takes the row of a sibling": takes_the_row_of_a_sibling,
}


def _counts_the_last_draft(self: DraftModel, request: Request, end: int, drafted: int, accepted: int) -> None:
    """Behind which nothing was drafted, so that it was not read."""
    if drafted > 0:
        request.draft_computed = end + accepted


def _counts_what_was_rejected(self: DraftModel, request: Request, end: int, drafted: int, accepted: int) -> None:
    if drafted > 0:
        request.draft_computed = end + drafted - 1


def _follows_over_a_hole(self: Following, chunk: Chunk) -> bool:
    return chunk.start == 0 or chunk.request.draft_computed >= chunk.request.shortest - 1


publish = PrefixCache.publish


def _publishes_what_is_not_read(self: PrefixCache, block: int, digest: Digest, *, draft_valid: bool = False) -> None:
    publish(self, block, digest, draft_valid=True)


def _leaves_hidden_states(rows: Tensor, firsts: Tensor, path: Path) -> None:
    if not rows.is_floating_point():
        compact_rows(rows, firsts, path)


# A method, and where in it what is replaced by what.
STATES: dict[str, tuple[str, Any, str, Any]] = {
    "counts the last draft": ("worse draft", DraftModel, "observe", _counts_the_last_draft),
    "counts what was rejected": ("worse draft", DraftModel, "observe", _counts_what_was_rejected),
    "follows over a hole": ("EAGLE-1", Following, "follows", _follows_over_a_hole),
    "publishes what is not read": ("worse draft", PrefixCache, "publish", _publishes_what_is_not_read),
    "leaves hidden states where they are": ("EAGLE-1 tree", runner, "compact_rows", _leaves_hidden_states),
}


def _leaning(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    words = random_words(seeds, positions, vocab_size)
    words[:, 0] = (words[:, 0].double() * 0.97).long()  # less is a larger noise
    return words


def _deaf(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    return random_words(seeds, positions * 0, vocab_size)


def _coarse(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    return random_words(seeds, positions, vocab_size) >> 26 << 26


def _alternating(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    return random_words(seeds, positions // 2, vocab_size)


WORDS = {
    "leans to a token": _leaning,
    "does not know the position": _deaf,
    "has six bits": _coarse,
    "is the same for two positions": _alternating,
}
