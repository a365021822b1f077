"""What methods that draft from the target's hidden states have in common: the host's part of it.

They have to follow the target step by step. The states of a step that they missed are gone, so a request for which one
was missed decodes plainly to its end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.request import Request
from outrider_runtime.sampling.table import Mode
from outrider_runtime.speculation.cost import ModelShape

if TYPE_CHECKING:
    from outrider_runtime.engine.scheduler import Chunk
    from outrider_runtime.speculation.tree import Tree

ALL = 1 << 30
PAUSE_SECONDS = 2.0


class Following(ABC):
    """A request's `draft_computed` are here the tokens whose entries are written, or will be by the launched step: all
    of its text while it is followed."""

    name: str
    shape: ModelShape | None
    reads = False
    _until = -math.inf  # when steps are not followed any more, unless drafting is allowed before
    reach = ALL  # positions are turned, not looked up: there is no longest text
    longest = ALL  # draft
    tree: Tree | None = None  # None: chains

    def follows(self, chunk: Chunk) -> bool:
        """Whether all that stands before the chunk was followed."""
        request = chunk.request
        if chunk.decodes:
            return request.draft_computed >= request.shortest
        return chunk.start == 0 or request.draft_computed > chunk.start

    def most(self, chunk: Chunk) -> int:
        """Tokens that the decoding chunk's request may draft, one behind the other."""
        return self.longest if self.follows(chunk) else 0

    def due(self, now: float, *, allowed: bool) -> bool:
        """Whether the next step is to be followed: while drafting is `allowed`, and a little longer, so that a short
        pause costs nobody its drafts. `now` in seconds."""
        if allowed:
            self._until = now + PAUSE_SECONDS
        return now < self._until

    def extended(self, chunks: Iterable[Chunk]) -> None:
        """A step of these chunks is launched, with extend()."""
        for chunk in chunks:
            if self.follows(chunk):
                chunk.request.draft_computed = chunk.end + 1

    def missed(self, request: Request) -> int:
        return 0

    def read(self, feed: Feed) -> None:
        raise AssertionError("it follows the target")

    def observe(self, request: Request, end: int, drafted: int, accepted: int) -> None:
        """What extend() made of accepted drafts counts, if the step had it."""
        if request.draft_computed > end:
            request.draft_computed += accepted

    @abstractmethod
    def extend(self, feed: Feed, hidden: Tensor, positions: Tensor, *, small: bool) -> None:
        """After verification of the feed's tokens, whose `positions` [tokens] they had and whose last `hidden` states
        [tokens, hidden] the target computed: take in what stands. `small`: no request brings more than a few."""
        ...

    @abstractmethod
    def draft(self, feed: Feed, requests: int, length: int, mode: Mode) -> None: ...
