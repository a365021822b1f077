"""The protocol of everything that drafts. A method is one file beside this and one line in the registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from outrider_runtime.engine.request import Request


class Proposer(Protocol):
    """Drafts chains. Tokens are drawn with the request's own noise (sampling/noise.py), so that they agree with the
    target's as often as the two distributions allow; nothing about the draft's distribution is kept."""

    name: str

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        """Drafts for each request, at most `lengths[i]` tokens (0: none), following its last token.

        May return fewer, none included. Catches up by itself on tokens it has not seen (a pause, a prefix hit).
        """
        ...

    def observe(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        """After verification: `accepted[i]` of the drafted tokens of request i stood, and its tokens are appended."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended or was preempted; its blocks are about to be released."""
        ...

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes of the draft's own KV arrays per block, 0 without any."""
        ...
