"""The pool of KV blocks: which are free, how many refer to each, which are kept for their contents.

A block is `block_size` token slots in every layer's KV arrays, of target and draft alike. A block whose last user
has gone keeps its contents while it is published (prefix.py) and is handed out again in least-recently-used order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """`on_evict(block)` is called before a published block's contents are given away."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block: None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # no contents worth keeping
        self._cached: OrderedDict[int, None] = OrderedDict()  # no users, contents kept; oldest first
        self._published = [False] * num_blocks

    @property
    def available(self) -> int:
        """Blocks that allocate() could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None and nothing taken when there are not enough."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._published[block] = False
            self._on_evict(block)
        self._refs[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more reference to a block that is in use or kept."""
        if self._refs[block] == 0:
            if block not in self._cached:
                raise ValueError(f"block {block} is free; only allocate() hands it out")
            del self._cached[block]
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less each. Give the last block of a sequence first: kept prefixes then go tail first."""
        for block in blocks:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._published[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int) -> None:
        """Keep this block's contents after its last user has gone."""
        if self._refs[block] == 0:
            raise ValueError(f"block {block} has no user; publish it before it is released")
        self._published[block] = True

    def withdraw(self, block: int) -> None:
        """Take publish() back: its contents are worth nothing any more."""
        self._published[block] = False
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)
