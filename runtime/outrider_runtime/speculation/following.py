"""What methods that draft from the target's hidden states have in common: the host's part of it.

They have to follow the target step by step. The states of a step that they missed are gone, so a request for which one
was missed decodes plainly to its end. Where drafting does not pay, following does not either: but for looks at new
requests now and then, nothing of the head runs.
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
LOOK_SECONDS = 0.5  # while drafting does not pay, new requests are followed for so long, to be probed,
LOOK_EVERY = 10.0  # and then not for so long


class Following(Proposer):
    """A request's `draft_computed` are here the tokens whose entries are written, or will be by the launched step: all
    of its text while it is followed."""

    extends = True
    bounded = True
    longest = sys.maxsize  # draft
    _until = -math.inf  # when steps are not followed any more, unless drafting pays before
    _next_look = -math.inf
    _now = -math.inf  # the last step's begin

    def follows(self, chunk: Chunk) -> bool:
        """Whether all that stands before it was followed."""
        request = chunk.request
        if chunk.decodes:
            return request.draft_computed >= request.shortest
        return chunk.start == 0 or request.draft_computed > chunk.start

    def most(self, chunk: Chunk) -> int:
        return self.longest if self.follows(chunk) else 0

    def due(self, now: float, *, allowed: bool, pays: bool) -> bool:
        """While drafting pays, and a little longer, so that a short pause costs nobody its drafts."""
        self._now = now
        if allowed and pays:
            self._until = now + PAUSE_SECONDS
        return now < self._until or (allowed and now >= self._next_look)

    def extended(self, chunks: Sequence[Chunk]) -> None:
        if self._now >= self._until:  # a look begins
            self._until, self._next_look = self._now + LOOK_SECONDS, self._now + LOOK_SECONDS + LOOK_EVERY
        for chunk in chunks:
            if self.follows(chunk):
                chunk.request.draft_computed = chunk.end + 1

    def observe(self, request: Request, end: int, drafted: int, accepted: int) -> None:
        """What extend() made of accepted drafts counts, if the step had it."""
        if request.draft_computed > end:
            request.draft_computed += accepted
