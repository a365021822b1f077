"""The protocol of everything that drafts. A method is one file beside this and one line in the registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from outrider_runtime.engine.feed import Feed
    from outrider_runtime.engine.request import Request
    from outrider_runtime.engine.scheduler import Chunk
    from outrider_runtime.sampling.table import Mode


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens of a request whose KV a draft must write, from `start` on, before it can draft."""

    request: Request
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """`lengths`: how many tokens each chunk drafts, at most its draft_length. `reads` come first."""

    lengths: list[int]
    reads: list[Read]


class Proposer(Protocol):
    """Drafts chains. Tokens are drawn with the request's own noise (sampling/noise.py), so that they agree with the
    target's as often as the two distributions allow; nothing about the draft's distribution is kept.

    plan() and observe() are the host's; read() and draft() are the device's, and look at nothing of the host's: where
    texts end only the device knows.
    """

    name: str

    def plan(self, chunks: Sequence[Chunk]) -> DraftPlan:
        """For the step that is about to be launched, with its chunks.

        Chunks that draft nothing are there to be followed: the target writes their KV in this step, and a draft with
        KV of its own does the same. It catches up by itself on what it has not seen (a pause, a prefix hit).
        """
        ...

    def read(self, feed: Feed) -> None:
        """Write the draft's KV of the feed's tokens: the plan's reads."""
        ...

    def draft(self, feed: Feed, requests: int, length: int, mode: Mode) -> Tensor | None:
        """Place `length` tokens behind each text of the feed's first `requests`, whose last token is not read yet.

        Returns how many of them are meant, [requests], int32; None means all.
        """
        ...

    def observe(self, request: Request, end: int, drafted: int, accepted: int) -> None:
        """After verification of `drafted` tokens behind a text of `end`, whose accepted ones are appended."""
        ...
