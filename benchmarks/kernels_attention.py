"""Times of the attention kernel on a CUDA device, by ways of tiling and splitting: inside CUDA graphs, the KV cold.

    python benchmarks/kernels_attention.py [few] [splits] [alone] [many] [plan] [--model 8b|1b] [--cases "5 q"]

`few`: decoding and verification, by tiles. `splits`: the same, by how contexts are split. `alone`: one request or a
few, by both. `many`: prefill and mixed steps, by tiles. `plan`: making a step's work list. Microseconds a layer; the
last columns rate the best.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from outrider_runtime.kernels.attention import paged_attention, plan_paged, tuning_for
from outrider_runtime.layers.attention import AttentionShape, PagedPlan, Tile, Tuning

BLOCK_SIZE = 16
COLD = 200 << 20  # bytes of KV between two uses of the same: L2 holds 50 MB
HEADS = {"8b": (32, 8, 128), "1b": (32, 8, 64)}  # query heads, KV heads, their size
Spans = Sequence[tuple[int, int]]  # queries and context of each request


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int

    def kv_bytes(self, spans: Spans) -> int:
        return sum(context for _, context in spans) * self.kv_heads * self.dim * 2 * 2

    def operations(self, spans: Spans) -> int:
        pairs = sum(queries * context - queries * (queries - 1) // 2 for queries, context in spans)
        return 4 * pairs * self.heads * self.dim


FEW: dict[str, Spans] = {
    "1 x 384": [(1, 384)],
    "1 x 4096": [(1, 4096)],
    "16 x 384": [(1, 384)] * 16,
    "64 x 384": [(1, 384)] * 64,
    "256 x 256": [(1, 256)] * 256,
    "64 x 4096": [(1, 4096)] * 64,
    "64 x 4224": [(1, 4224)] * 64,
    "5 q, 1 x 384": [(5, 384)],
    "5 q, 16 x 384": [(5, 384)] * 16,
    "5 q, 64 x 384": [(5, 384)] * 64,
    "5 q, 64 x 4096": [(5, 4096)] * 64,
    "5 q, 64 x 4224": [(5, 4224)] * 64,
    "5 q, 64 x 256 to 8192": [(5, 256 + 126 * request) for request in range(64)],
    "5 q, 63 x 300, 8192": [(5, 300)] * 63 + [(5, 8192)],
    "5 q, 100 x 4224": [(5, 4224)] * 100,
    "17 q, 1 x 384": [(17, 384)],
    "5 q, 256 x 256": [(5, 256)] * 256,
}
FEW_TILES = [
    Tile(64, 64, 3, 4, 2),
    Tile(16, 32, 3, 4, 4),
    Tile(16, 32, 3, 2, 6),
    Tile(16, 64, 2, 2, 4),
    Tile(32, 32, 3, 2, 4),
    Tile(32, 32, 2, 2, 6),
    Tile(32, 64, 2, 2, 4),
    Tile(32, 64, 3, 2, 2),
]
SPLITS = [(2**power, 16) for power in range(6, 14)]  # tokens at least, parts at most
ALONE: dict[str, Spans] = {
    "1 x 384": [(1, 384)],
    "2 q, 1 x 384": [(2, 384)],
    "4 x 384": [(1, 384)] * 4,
    "8 x 384": [(1, 384)] * 8,
    "5 q, 1 x 384": [(5, 384)],
    "5 q, 4 x 384": [(5, 384)] * 4,
    "5 q, 1 x 4096": [(5, 4096)],
}
ALONE_TILES = [
    Tile(16, 32, 2, 4, 4),
    Tile(16, 64, 2, 2, 4),
    Tile(16, 64, 2, 4, 4),
    Tile(64, 32, 2, 4, 2),
    Tile(64, 64, 2, 4, 2),
]
MANY: dict[str, Spans] = {
    "512 of 512": [(512, 512)],
    "2048 of 2048": [(2048, 2048)],
    "2048 of 4096": [(2048, 4096)],
    "2048 of 8192": [(2048, 8192)],
    "256 of 8192": [(256, 8192)],
    "4 x 512 of 512": [(512, 512)] * 4,
    "1792 of 8192, 64 x 4096": [(1792, 8192)] + [(1, 4096)] * 64,
}
MANY_TILES = [
    Tile(128, 64, 3, 8, 1),
    Tile(128, 64, 2, 8, 2),
    Tile(128, 128, 2, 8, 1),
    Tile(128, 64, 2, 4, 2),
    Tile(128, 32, 3, 4, 2),
    Tile(64, 64, 2, 4, 3),
    Tile(64, 128, 2, 4, 2),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[Shape], None]] = {
        "few": few,
        "splits": splits,
        "alone": alone,
        "many": many,
        "plan": plans,
    }
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    parser.add_argument("--model", choices=HEADS, default="8b")
    parser.add_argument("--cases", default="", help="only those whose names begin so")
    given = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(), given.model)
    for cases in (FEW, ALONE, MANY):
        for name in [name for name in cases if not name.startswith(given.cases)]:
            del cases[name]
    for part in given.parts or parts:
        parts[part](Shape(*HEADS[given.model]))


def few(shape: Shape) -> None:
    usual = tuning_for(torch.bfloat16, shape.dim, 256)
    ways = {_name(tile): replace(usual, small=tile) for tile in FEW_TILES}
    _table("decoding and verification, by tile", shape, FEW, ways, small=True)


def splits(shape: Shape) -> None:
    usual = tuning_for(torch.bfloat16, shape.dim, 256)
    ways = {f"{size}, {most}": replace(usual, split_tokens=size, max_splits=most) for size, most in SPLITS}
    _table("the same, by split", shape, FEW, ways, small=True)


def alone(shape: Shape) -> None:
    usual = tuning_for(torch.bfloat16, shape.dim, 1)
    tiles = dict.fromkeys((usual.narrow, usual.small, *ALONE_TILES))
    ways = {
        f"{_name(tile)} {size}": replace(usual, small=tile, split_tokens=size)
        for tile in tiles
        for size in (32, 64, 128)
    }
    _table("one request, by tile and split", shape, ALONE, ways, small=True)


def many(shape: Shape) -> None:
    usual = tuning_for(torch.bfloat16, shape.dim, 256)
    ways = {_name(tile): replace(usual, large=tile) for tile in MANY_TILES}
    _table("prefill and mixed steps, by tile", shape, MANY, ways, small=False)


def plans(shape: Shape) -> None:
    print("\nmaking the list, us")
    for name, spans in {**FEW, **MANY}.items():
        case = _Case(shape, spans, layers=1)
        print(name.ljust(24), f"{_time(partial(case.plan, None, small=False), 1):8.1f}")


def _table(title: str, shape: Shape, cases: dict[str, Spans], ways: dict[str, Tuning], *, small: bool) -> None:
    print(f"\n{title}, us")
    print(" " * 24, *(way.rjust(16) for way in ways), "best TB/s".rjust(10), "TFLOP/s".rjust(8))
    for name, spans in cases.items():
        layers = max(4, min(32, COLD // shape.kv_bytes(spans)))
        case = _Case(shape, spans, layers)
        times = [case.time(case.plan(tuning, small=small)) for tuning in ways.values()]
        rates = shape.kv_bytes(spans) / min(times) / 1e6, shape.operations(spans) / min(times) / 1e6
        print(name.ljust(24), *(f"{time:16.1f}" for time in times), f"{rates[0]:10.2f} {rates[1]:8.0f}", flush=True)


def _name(tile: Tile) -> str:
    return f"{tile.rows}x{tile.keys} s{tile.stages} w{tile.warps} x{tile.per_processor}"


class _Case:
    def __init__(self, shape: Shape, spans: Spans, layers: int) -> None:
        self._shape = shape
        counts = [-(-context // BLOCK_SIZE) for _, context in spans]
        order = torch.randperm(sum(counts), dtype=torch.int32).tolist()
        tables = torch.zeros(len(spans), max(8192, *(context for _, context in spans)) // BLOCK_SIZE, dtype=torch.int32)
        for row, count in enumerate(counts):
            tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        self._tables = tables.cuda()
        self._rows = torch.arange(len(spans), dtype=torch.int32, device="cuda")
        queries = torch.tensor([0, *(queries for queries, _ in spans)])
        self._starts = queries.cumsum(0).to("cuda", torch.int32)
        self._contexts = torch.tensor([context for _, context in spans], dtype=torch.int32, device="cuda")
        self._tokens = int(queries.sum())
        kv = (layers, 2, sum(counts) * BLOCK_SIZE, shape.kv_heads, shape.dim)
        self._caches = torch.empty(kv, dtype=torch.bfloat16, device="cuda").normal_()
        self._query = torch.randn(self._tokens, shape.heads, shape.dim, dtype=torch.bfloat16, device="cuda")

    def plan(self, tuning: Tuning | None, *, small: bool) -> PagedPlan:
        return plan_paged(
            self._starts,
            self._contexts,
            self._rows,
            self._tables,
            tokens=self._tokens,
            block_size=BLOCK_SIZE,
            shape=AttentionShape(self._shape.kv_heads, self._shape.heads // self._shape.kv_heads, None, torch.bfloat16),
            dim=self._shape.dim,
            small=small,
            tuning=tuning,
        )

    def time(self, plan: PagedPlan) -> float:
        def layers() -> Tensor:
            result = self._query
            for keys, values in self._caches:
                result = paged_attention(result, keys, values, plan, self._shape.dim**-0.5)
            return result

        return _time(layers, len(self._caches))


def _time(work: Callable[[], object], layers: int) -> float:
    """Microseconds for one of the `layers` that `work` launches."""
    torch.cuda.synchronize()  # the case is made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / layers)
    return median(times[2:])


if __name__ == "__main__":
    main()
