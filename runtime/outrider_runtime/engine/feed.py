"""What the host says of a step: who takes part with how many tokens. Packed, and copied to the device at once.

A Feed knows no token and no position of a decoding request: these the device finds in its own state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

AT_THE_END = -1  # a start: the request's last token, wherever that is


@dataclass(frozen=True, slots=True)
class Share:
    """One request's share of a step: `length` tokens from `start` on (or AT_THE_END, then one), then its drafts."""

    slot: int
    start: int
    length: int
    drafts: int
    capacity: int  # tokens that its blocks hold
    samples: bool  # the target's token behind the last one and behind each draft is wanted
    written: int = 0  # tokens whose KV is there and stays as it is: others may be reading it


BlockUpdate = tuple[int, int, int]  # slot, index, block: the request's index-th block is this one


@dataclass(frozen=True, slots=True)
class Feed:
    """Device tensors, int32. N requests, T tokens, R sampled rows, U updates; each may be padded. Entry N of the
    [N + 1] ones is nobody's, and owns the padding."""

    slots: Tensor  # [N + 1]
    starts: Tensor  # [N + 1]
    drafts: Tensor  # [N + 1]
    capacities: Tensor  # [N + 1]
    written: Tensor  # [N + 1]
    first_rows: Tensor  # [N + 1] where a request's sampled rows begin; -1: it has none
    query_starts: Tensor  # [N + 1] where a request's tokens begin; the last is their number
    owners: Tensor  # [T] whose token it is, an index into the above
    rows: Tensor  # [R] which token a row is sampled behind
    update_slots: Tensor  # [U]
    update_indices: Tensor  # [U]
    update_blocks: Tensor  # [U]


@dataclass(frozen=True, slots=True)
class FeedShape:
    requests: int
    tokens: int
    rows: int
    updates: int

    def sizes(self) -> dict[str, int]:
        per_request = dict.fromkeys(
            ("slots", "starts", "drafts", "capacities", "written", "first_rows", "query_starts"), self.requests + 1
        )
        per_update = dict.fromkeys(("update_slots", "update_indices", "update_blocks"), self.updates)
        return per_request | {"owners": self.tokens, "rows": self.rows} | per_update


def shape_of(shares: Sequence[Share], updates: Sequence[BlockUpdate]) -> FeedShape:
    """Without any padding."""
    return FeedShape(
        requests=len(shares),
        tokens=sum(share.length + share.drafts for share in shares),
        rows=sum(1 + share.drafts for share in shares if share.samples),
        updates=len(updates),
    )


class FeedBuffer:
    """Fixed places on the device for the largest feed, so that captured graphs find each one where they look.

    Two host buffers in turn: one may still be on its way while the next is filled.
    """

    def __init__(self, largest: FeedShape, nobody: int, device: torch.device) -> None:
        self._nobody = nobody
        self._most = largest.sizes()
        self._places: dict[str, int] = {}
        size = 0
        for name, length in largest.sizes().items():
            self._places[name] = size
            size += length
        pinned = device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)

    def pack(self, shares: Sequence[Share], updates: Sequence[BlockUpdate], shape: FeedShape) -> Feed:
        """Fill and send. `shape` is at least the feed's own, and at most the largest."""
        sizes = shape.sizes()
        if any(size > self._most[name] for name, size in sizes.items()):
            raise ValueError(f"a step of {shape} has no room in feeds of {self._most}")
        self._host.reverse()
        array = self._host[0].numpy()
        host = {name: array[place : place + sizes[name]] for name, place in self._places.items()}
        _fill(host, shares, updates, self._nobody)
        self._device.copy_(self._host[0], non_blocking=True)
        return self.views(shape)

    def views(self, shape: FeedShape) -> Feed:
        """The places that a feed of this shape is read from."""
        sizes = shape.sizes()
        return Feed(
            **{
                field.name: self._device[self._places[field.name] : self._places[field.name] + sizes[field.name]]
                for field in fields(Feed)
            }
        )


def _fill(host: dict[str, np.ndarray], shares: Sequence[Share], updates: Sequence[BlockUpdate], nobody: int) -> None:
    n = len(shares)
    table = np.array(
        [
            (share.slot, share.start, share.drafts, share.capacity, share.length, share.samples, share.written)
            for share in shares
        ],
        dtype=np.int32,
    ).reshape(n, 7)
    for name, column, padding in (
        ("slots", 0, nobody),
        ("starts", 1, 0),
        ("drafts", 2, 0),
        ("capacities", 3, 0),
        ("written", 6, 0),
    ):
        host[name][:n] = table[:, column]
        host[name][n:] = padding
    lengths = table[:, 4] + table[:, 2]
    ends = np.cumsum(lengths)
    tokens = int(ends[-1]) if n else 0
    host["query_starts"][0] = 0
    host["query_starts"][1 : n + 1] = ends
    host["query_starts"][n + 1 :] = tokens
    host["owners"][:tokens] = np.repeat(np.arange(n, dtype=np.int32), lengths)
    host["owners"][tokens:] = len(host["slots"]) - 1
    counts = np.where(table[:, 5] != 0, 1 + table[:, 2], 0)
    row_ends = np.cumsum(counts)
    rows = int(row_ends[-1]) if n else 0
    host["first_rows"][:n] = np.where(counts > 0, row_ends - counts, -1)
    host["first_rows"][n:] = -1
    host["rows"][:rows] = np.repeat(ends - row_ends, counts) + np.arange(rows)
    host["rows"][rows:] = 0
    changes = np.array(updates, dtype=np.int32).reshape(-1, 3)
    for name, column, padding in (("update_slots", 0, nobody), ("update_indices", 1, 0), ("update_blocks", 2, 0)):
        host[name][: len(changes)] = changes[:, column]
        host[name][len(changes) :] = padding
