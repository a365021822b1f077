"""The protocol of everything that drafts. A method is one file beside this and one line in the registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from outrider_runtime.engine.request import Request
    from outrider_runtime.engine.scheduler import Chunk


class Proposer(Protocol):
    """Drafts chains. Tokens are drawn with the request's own noise (sampling/noise.py), so that they agree with the
    target's as often as the two distributions allow; nothing about the draft's distribution is kept."""

    name: str

    def propose(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """For each chunk of the step at most `chunk.draft_length` tokens that may follow it; fewer, or none, are fine.

        Chunks that draft nothing are there to be followed: the target writes their KV in this step, and a draft with
        KV of its own does the same. It catches up by itself on what it has not seen (a pause, a prefix hit).
        """
        ...

    def observe(self, requests: Sequence[Request]) -> None:
        """After verification: the accepted tokens are appended, and `computed` has moved on."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended; what is kept for it can go."""
        ...
