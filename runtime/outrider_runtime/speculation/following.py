"""What methods that draft from the target's hidden states have in common: the host's part of it.

They have to follow the target step by step. The states of a step that they missed are gone, so a request for which one
was missed decodes plainly to its end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider_runtime.engine.request import Request
from outrider_runtime.speculation.proposer import Proposer

if TYPE_CHECKING:
    from outrider_runtime.engine.scheduler import Chunk

PAUSE_SECONDS = 2.0


class Following(Proposer):
    """A request's `draft_computed` are here the tokens whose entries are written, or will be by the launched step: all
    of its text while it is followed."""

    extends = True
    bounded = True
    longest = sys.maxsize  # draft
    _until = -math.inf  # when steps are not followed any more, unless drafting is allowed before

    def follows(self, chunk: Chunk) -> bool:
        """Whether all that stands before the chunk was followed."""
        request = chunk.request
        if chunk.decodes:
            return request.draft_computed >= request.shortest
        return chunk.start == 0 or request.draft_computed > chunk.start

    def most(self, chunk: Chunk) -> int:
        return self.longest if self.follows(chunk) else 0

    def due(self, now: float, *, allowed: bool) -> bool:
        """While drafting is allowed, and a little longer, so that a short pause costs nobody its drafts."""
        if allowed:
            self._until = now + PAUSE_SECONDS
        return now < self._until

    def extended(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if self.follows(chunk):
                chunk.request.draft_computed = chunk.end + 1

    def observe(self, request: Request, end: int, drafted: int, accepted: int) -> None:
        """What extend() made of accepted drafts counts, if the step had it."""
        if request.draft_computed > end:
            request.draft_computed += accepted
