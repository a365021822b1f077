"""Make what a verified tree leaves look as if its branch that stands had been drafted alone.

Along a branch numbers only grow, so nothing moves forward; but one's new place may be another's old one. On CUDA it is
one kernel (kernels/tree.py) for all layers; the torch here says what that does, and does it elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_runtime.kv.cache import KVCache


@dataclass(frozen=True, slots=True)
class Path:
    """Which drafts stand, of a step's requests: by speculation/verify.py's commit_tree()."""

    ends: Tensor  # [requests] int32, the texts' lengths before the step
    nodes: Tensor  # [requests, depth] int32, a draft's number in its tree (the first is 1); -1 behind the last


def compact_kv(cache: KVCache, block_tables: Tensor, slots: Tensor, path: Path) -> None:
    """In all layers, for texts in `slots` [requests], rows of `block_tables`: draft i's KV lies at position end - 1 +
    i; afterwards the n-th that stands has its own at end - 1 + n."""
    if cache.arrays.is_cuda:
        from outrider_runtime.kernels import tree  # Triton, which a CPU does without

        tree.compact_kv(cache.arrays, block_tables, slots, path.ends, path.nodes, cache.block_size)
        return
    requests, turns = _moves(path.nodes)
    first, tables = path.ends[requests].long() - 1, block_tables[slots[requests]].long()

    def places(numbers: Tensor) -> Tensor:
        positions = first + numbers
        blocks = tables.gather(1, (positions // cache.block_size).unsqueeze(1)).squeeze(1)
        return blocks * cache.block_size + positions % cache.block_size

    cache.arrays[:, :, places(turns + 1)] = cache.arrays[:, :, places(path.nodes[requests, turns].long())]


def compact_rows(rows: Tensor, firsts: Tensor, path: Path) -> None:
    """The same for `rows` [tokens, width] that belong to the step's tokens, dense; a request's begin at `firsts`
    [requests] int32, -1 if it has none."""
    if rows.is_cuda:
        from outrider_runtime.kernels import tree  # Triton, which a CPU does without

        tree.compact_rows(rows, firsts, path.nodes)
        return
    requests, turns = _moves(torch.where(firsts.unsqueeze(1) < 0, -1, path.nodes))
    first = firsts[requests].long()
    rows[first + turns + 1] = rows[first + path.nodes[requests, turns]]


def _moves(nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Which requests' and which drafts that stand have to move, each [moves] int64."""
    turns = torch.arange(nodes.shape[1], device=nodes.device)
    requests, moving = (nodes > turns + 1).nonzero().unbind(1)
    return requests, moving
