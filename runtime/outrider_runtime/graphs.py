"""CUDA graphs: a program captured once for each shape and replayed as one launch.

On other devices the same programs run as they are, with the shapes they are given.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

# Widths that graphs are captured for. Up to some 256 a step is bound by the weights' bytes, and what it computes in
# vain costs nothing; above, products are made in tiles of 128 rows, and padding costs what it computes. Hardly any step
# but a prompt's has more than 2,048, and of a prompt's all but the last are full.
BUCKETS = (
    *(1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384),
    *range(512, 2048, 128),
    *range(2048, 4096, 512),
    *range(4096, 16385, 2048),
)

TIMED = 5  # steps in a row
SHORT = 0.02  # seconds of a step on a host that is run again, for being warm


def buckets(largest: int) -> tuple[int, ...]:
    """Those up to `largest`, which is one of them in any case."""
    return (*(bucket for bucket in BUCKETS if bucket < largest), largest)


def unpadded(largest: int) -> tuple[int, ...]:
    """Where nothing is padded, sizes that differ enough to cost differently."""
    few = [*range(1, 17)]
    while few[-1] < largest:
        few.append(few[-1] + 2 ** (few[-1].bit_length() - 3))  # by a quarter, an eighth at most
    return (*(size for size in few if size < largest), largest)


def bucket(widths: Sequence[int], width: int) -> int:
    """The smallest of `widths`, which ascend, that has room for `width`."""
    return widths[bisect_left(widths, width)]


def seconds(device: torch.device, step: Callable[[], None]) -> float:
    """That a step takes once it is warm, its programs captured."""
    begin = time.perf_counter()
    step()
    if device.type != "cuda":
        times = [time.perf_counter() - begin]
        while len(times) < 3 and times[0] < SHORT:
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        return min(times)
    step()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    begun.record()
    for _ in range(TIMED):
        step()
    ended.record()
    ended.synchronize()
    return 1e-3 * float(begun.elapsed_time(ended)) / TIMED


class Graphs:
    """Captured programs by key. A program takes what it needs from fixed places on the device and leaves its results
    in others; it must not synchronise with the host."""

    def __init__(self, device: torch.device) -> None:
        self.active = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.active else None
        self._held: list[Callable[[], None]] | None = None

    @contextmanager
    def holding(self) -> Iterator[list[Callable[[], None]]]:
        """Programs that were to run meanwhile, which do not."""
        held: list[Callable[[], None]] = []
        self._held = held
        try:
            yield held
        finally:
            self._held = None

    def run(self, key: Hashable, program: Callable[[], None]) -> None:
        """Replay the program of this key, captured now if it was not yet."""
        if self._held is not None:
            self._held.append(program)
            return
        if not self.active:
            program()
            return
        if (graph := self._graphs.get(key)) is None:
            program()  # compiles kernels, and is this run
            self._capture(key, program)
        else:
            graph.replay()

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return not self.active or key in self._graphs

    def _capture(self, key: Hashable, program: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            program()
        self._graphs[key] = graph
