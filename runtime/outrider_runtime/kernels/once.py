"""Kernels that handle a few numbers a request. Batches of every size come by, and rows that begin anywhere in an array:
a compilation for each one, each multiple of 16 and each address that is one would gain nothing, and a server's start
would wait for it."""

from __future__ import annotations

import triton

COUNTS = ["count", "rows", "tokens", "requests", "turn"]
ROWS = [
    *("before", "behind", "contexts", "deep", "drafts", "ends", "ids", "indices", "kv_slots", "own_slots", "positions"),
    *("seen", "slots", "texts_of_ends"),
]

compiled_once = triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=ROWS)
