"""What everything that drafts does. A method is one file beside this and one line in the registry."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from outrider_runtime.engine.feed import Feed
    from outrider_runtime.engine.request import Request
    from outrider_runtime.engine.scheduler import Chunk
    from outrider_runtime.sampling.table import Mode
    from outrider_runtime.speculation.cost import ModelShape
    from outrider_runtime.speculation.tree import Tree


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens of a request whose KV a draft must write, from `start` on, before it can draft."""

    request: Request
    start: int
    length: int


class Proposer:
    """Drafts chains, or trees. Tokens are drawn with the request's own noise (sampling/noise.py), so that they agree
    with the target's as often as the two distributions allow; nothing about the draft's distribution is kept. A method
    has draft(), and of the rest what concerns it.

    read(), draft() and extend() are the device's, and look at nothing of the host's: where texts end only the device
    knows. The rest is the host's. How much is drafted and read is not the method's to decide (adaptive.py).
    """

    name: str
    reads = False  # it has KV of its own, which read() writes: of prompts, as the target reads them, and what it missed
    extends = False  # it follows the target: extend() is launched behind its steps
    bounded = False  # most() has something to say
    reach = sys.maxsize  # tokens of the longest text, drafts included, that it has positions for
    shape: ModelShape | None = None  # what a turn of its loop costs; None: nearly nothing
    tree: Tree | None = None  # None: chains
    taps: Tensor | None = None  # the target's (models/causal.py), if it reads them

    def awaits(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the launched step, of these chunks, is to be read before the next one is launched. Called before each
        launch, while the device works."""
        return False

    def most(self, chunk: Chunk) -> int:
        """Tokens that the decoding chunk's request may draft, one behind the other."""
        return sys.maxsize

    def missed(self, request: Request) -> int:
        """How many tokens a decoding request's draft has to read before it can draft."""
        return 0

    def due(self, now: float, *, allowed: bool, pays: bool) -> bool:
        """Whether the next step is to be followed, if it has anybody who can be. `now` in seconds; `allowed`: the
        policy allows drafting; `pays`: it is to be expected."""
        return False

    def follows(self, chunk: Chunk) -> bool:
        """Whether extend() behind the chunk's step would be of use to its request."""
        return False

    def send(self, chunks: Sequence[Chunk]) -> None:
        """Before the launch of a step that drafts; chunks say how much."""

    def read(self, feed: Feed) -> None:
        """Write the draft's KV of the feed's tokens."""
        raise AssertionError(f"{self.name} does not read texts")

    def draft(self, feed: Feed, requests: int, length: int, mode: Mode) -> Tensor | None:
        """Place `length` tokens behind each text of the feed's first `requests`, whose last token is not read yet.

        Returns how many of them are meant, [requests], int32; None means all.
        """
        raise NotImplementedError

    def extend(self, feed: Feed, hidden: Tensor, positions: Tensor, *, small: bool) -> None:
        """After verification of the feed's tokens, whose `positions` [tokens] they had and whose last `hidden` states
        [tokens, hidden] the target computed: take in what stands. `small`: no request brings more than a few."""
        raise AssertionError(f"{self.name} does not follow the target")

    def extended(self, chunks: Sequence[Chunk]) -> None:
        """A step of these chunks is launched, with extend()."""

    def observe(self, request: Request, end: int, drafted: int, accepted: int) -> None:
        """After verification of `drafted` tokens behind a text of `end`, whose accepted ones are appended."""

    def forget(self, request: Request) -> None:
        """It has ended."""
