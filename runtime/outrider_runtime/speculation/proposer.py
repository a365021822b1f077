"""The protocol of everything that drafts. A method is one file beside this and one line in the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from outrider_runtime.engine.feed import Feed
    from outrider_runtime.engine.request import Request
    from outrider_runtime.sampling.table import Mode
    from outrider_runtime.speculation.cost import ModelShape


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens of a request whose KV a draft must write, from `start` on, before it can draft."""

    request: Request
    start: int
    length: int


class Proposer(Protocol):
    """Drafts chains. Tokens are drawn with the request's own noise (sampling/noise.py), so that they agree with the
    target's as often as the two distributions allow; nothing about the draft's distribution is kept.

    missed() and observe() are the host's; read() and draft() are the device's, and look at nothing of the host's:
    where texts end only the device knows. How much is drafted and read is not the method's to decide (adaptive.py).
    """

    name: str
    reads: bool  # it has KV of its own, which read() writes: of prompts as the target reads them, and of what it missed
    reach: int  # tokens of the longest text, drafts included, that it has positions for
    shape: ModelShape | None  # what a turn of its loop costs; None: nearly nothing

    def missed(self, request: Request) -> int:
        """How many tokens a decoding request's draft has to read before it can draft."""
        ...

    def read(self, feed: Feed) -> None:
        """Write the draft's KV of the feed's tokens."""
        ...

    def draft(self, feed: Feed, requests: int, length: int, mode: Mode) -> Tensor | None:
        """Place `length` tokens behind each text of the feed's first `requests`, whose last token is not read yet.

        Returns how many of them are meant, [requests], int32; None means all.
        """
        ...

    def observe(self, request: Request, end: int, drafted: int, accepted: int) -> None:
        """After verification of `drafted` tokens behind a text of `end`, whose accepted ones are appended."""
        ...
