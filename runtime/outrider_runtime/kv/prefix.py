"""Which prefixes the KV cache holds: a chain of hashes over full blocks, each over its parent's and its own tokens.

Target and draft share the chain. A block whose draft KV was never written (speculation was off) is known as such, and
ends what a new request may take over for its draft.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from outrider_runtime.kv.blocks import BlockPool

Digest = bytes


def extend_chain(chain: list[Digest], tokens: Sequence[int], block_size: int, length: int) -> None:
    """Append the digests of the full blocks of tokens[:length] that `chain` does not cover yet."""
    for index in range(len(chain), length // block_size):
        block = array("q", tokens[index * block_size : (index + 1) * block_size])
        chain.append(blake2b((chain[-1] if chain else b"") + block.tobytes(), digest_size=16).digest())


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """`blocks` hold the longest known prefix, one reference each taken; the first `draft_blocks` the draft's too."""

    blocks: list[int]
    draft_blocks: int


class PrefixCache:
    """Owns the pool, since a block given away must be forgotten in the same breath."""

    def __init__(self, num_blocks: int, enabled: bool = True) -> None:
        self.pool = BlockPool(num_blocks, self._forget)
        self.enabled = enabled
        self._block_of: dict[Digest, int] = {}
        self._digest_of: dict[int, Digest] = {}
        self._draft_valid: set[int] = set()

    def take(self, chain: Sequence[Digest]) -> PrefixHit:
        """The longest prefix of this chain, acquired."""
        blocks: list[int] = []
        for digest in chain:
            if (block := self._block_of.get(digest)) is None:
                break
            self.pool.acquire(block)
            blocks.append(block)
        invalid = (index for index, block in enumerate(blocks) if block not in self._draft_valid)
        return PrefixHit(blocks, next(invalid, len(blocks)))

    def publish(self, block: int, digest: Digest, *, draft_valid: bool = False) -> None:
        """A full block's KV is written and its tokens are verified. Of several equal blocks the first is kept, or the
        first with the draft's KV, if this one is so far."""
        if not self.enabled:
            return
        if (known := self._block_of.get(digest)) is not None:
            if known in self._draft_valid or not draft_valid:
                return
            self._forget(known)
            self.pool.withdraw(known)
        self._block_of[digest] = block
        self._digest_of[block] = digest
        self.pool.publish(block)
        if draft_valid:
            self._draft_valid.add(block)

    def mark_draft_valid(self, block: int) -> None:
        """The block's draft KV is written too."""
        if block in self._digest_of:
            self._draft_valid.add(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
        self._draft_valid.discard(block)
