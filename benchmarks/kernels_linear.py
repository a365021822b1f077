"""What a model's linear layers and all that surrounds them cost on a CUDA device, inside CUDA graphs, weights cold.

    python benchmarks/kernels_linear.py [stack] [products] [around] [many] [--model 8b|1b] [--rows 1 5 16]

`stack` is a whole model without its attention, by ways of doing it; `products` every matrix by itself with what
surrounds it, the library's product and the kernels around that beside ours, by the rule's tiling and by others, the
fastest first; `around` what few large batches need besides products; `many` a layer's products of many rows, gate and
up, and heads, with what follows by the library or by our kernels, in turns, since all make the device so hot that it
slows down; `largest` greedy tokens of many rows, in the same way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider_runtime.kernels.activation import silu_gate
from outrider_runtime.kernels.norm import rms_norm
from outrider_runtime.kernels.rope import turn_and_store
from outrider_runtime.kernels.sampling import draw
from outrider_runtime.kernels.skinny import WAVE, Tiling, product, tiling
from outrider_runtime.kernels.tall import (
    gated_product,
    gating_pays,
    largest_of_product,
    largest_pays,
    turned_product,
    turning_pays,
)
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers import linear
from outrider_runtime.layers.batch import Batch
from outrider_runtime.layers.rope import Turn, split_qkv
from outrider_runtime.models import llama
from outrider_runtime.models.config import ModelConfig
from outrider_runtime.sampling.table import Mode, SamplingTable

ROWS = (1, 2, 5, 8, 16, 32, 64)
MANY_ROWS = (128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 2048, 8192)
COLD = 256 << 20  # bytes of weights between two uses of the same: L2 holds 50 MB
SHARED_MEMORY = 227 << 10  # bytes of an H100's or H200's multiprocessor
# Tilings to try, less their splits: [up to 16 rows, many outputs] -> width, depth, stages, warps
TILES = {
    (True, True): [(64, 256, 4, 4), (128, 64, 5, 4), (128, 128, 4, 8), (256, 64, 5, 8), (256, 128, 3, 8)],
    (True, False): [(32, 256, 4, 4), (64, 128, 5, 4), (64, 256, 3, 4), (64, 256, 5, 4), (128, 128, 4, 8)],
    (False, True): [(64, 128, 4, 4), (128, 128, 4, 8), (128, 128, 5, 8), (256, 64, 5, 8), (256, 128, 3, 8)],
    (False, False): [(32, 256, 4, 4), (64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 4, 4), (128, 128, 5, 8)],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS = {
    "8b": ModelConfig("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 5e5, LLAMA3),
    "1b": ModelConfig(
        "LlamaForCausalLM", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5, LLAMA3, tie_word_embeddings=True
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["stack", "products", "around", "many", "largest", []], default=[])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    given = parser.parse_args()
    parts = {"stack": stack, "products": products, "around": around, "many": many, "largest": largest}
    print(torch.__version__, torch.cuda.get_device_name())
    for name in given.model or MODELS:
        for part in given.parts or parts:
            parts[part](name, MODELS[name], given.rows)


@torch.inference_mode()
def stack(name: str, config: ModelConfig, rows: Iterable[int]) -> None:
    """One graph from embedding to logits, the attention left out."""
    model = llama.LlamaForCausalLM(config, torch.bfloat16, "cuda")
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    size = sum(weight.nbytes for weight in model.parameters()) - (
        0 if config.tie_word_embeddings else model.embedding.weight.nbytes
    )
    cache = KVCache(config, 8, 16, torch.bfloat16, "cuda")
    print(f"\n{name} stack, ms; {size / 1e9:.2f} GB of weights, {size / 4.3e9:.2f} ms at 4.3 TB/s")
    ways = {"library": (0, True), "turned apart": (64, False), "fused": (64, True)}
    print("rows".rjust(5), *(way.rjust(14) for way in ways))
    for count in rows:
        ids = torch.arange(count, device="cuda")
        batch = Batch(token_ids=ids, positions=ids + 100, slots=ids, attention=())
        times = []
        for limit, turned in ways.values():
            with _fused(limit, turned):
                times.append(timed(lambda batch=batch: model.logits(model(batch, cache))))
        print(str(count).rjust(5), *(f"{time / 1e3:14.3f}" for time in times), flush=True)


@torch.inference_mode()
def products(name: str, config: ModelConfig, rows: Iterable[int]) -> None:
    """Each matrix alone, many times over with other weights."""
    hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes = {
        "qkv": ((config.num_heads + 2 * config.num_kv_heads) * dim, hidden),
        "o": (hidden, config.num_heads * dim),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
        "head": (config.vocab_size, hidden),
    }
    print(f"\n{name} products, us and TB/s; ours: width, depth, splits, stages, warps, * if the rule's")
    for matrix, (outputs, inputs) in shapes.items():
        copies = -(-COLD // (outputs * inputs * 2))
        weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
        for count in rows:
            work = Work(matrix, config, outputs, inputs, count)
            times = {"library": timed(lambda work=work, ws=weights: [work.library(w) for w in ws]) / copies}
            for plan in work.plans():
                label = _words(plan) + ("*" if plan == work.rule else "")
                times[label] = timed(lambda work=work, ws=weights, plan=plan: [work.ours(w, plan) for w in ws]) / copies
            line = (f"{label} {_speed(time, weights[0])}" for label, time in sorted(times.items(), key=itemgetter(1)))
            print(matrix.rjust(8), str(count).rjust(3), " | ".join(line), flush=True)


@torch.inference_mode()
def around(name: str, config: ModelConfig, _: Iterable[int]) -> None:
    """By tokens: a residual added within the library's product or not; norm, gate, rotation and KV writes."""
    hidden, ffn, heads, kv_heads = config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads
    down = [torch.randn(hidden, ffn, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    cache = KVCache(config, 256, 16, torch.bfloat16, "cuda").layers[0]
    print(f"\n{name}, us by tokens: down | down + residual | down into residual | norm | gate | rotation and KV")
    for count in (1, 16, 64, 256, 1024, 2048):
        x = torch.randn(count, ffn, dtype=torch.bfloat16, device="cuda")
        residual = torch.zeros(count, hidden, dtype=torch.bfloat16, device="cuda")
        merged = torch.randn(count, 2 * ffn, dtype=torch.bfloat16, device="cuda")
        qkv = torch.randn(count, (heads + 2 * kv_heads) * config.head_dim, dtype=torch.bfloat16, device="cuda")
        turn = Turn(
            *torch.ones(2, count, 1, config.head_dim, device="cuda"), *cache, torch.arange(count, device="cuda")
        )
        weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
        works: list[Callable[[], object]] = [
            lambda x=x: [F.linear(x, w) for w in down],
            lambda x=x, r=residual: [r + F.linear(x, w) for w in down],
            lambda x=x, r=residual: [r.addmm_(x, w.T) for w in down],
            lambda r=residual, w=weight: [rms_norm(r, w, 1e-5) for _ in down],
            lambda m=merged: [silu_gate(m) for _ in down],
            lambda q=qkv, t=turn: [_turned(q, t) for _ in down],
        ]
        print(str(count).rjust(5), " | ".join(f"{timed(work) / len(down):8.2f}" for work in works))


@torch.inference_mode()
def many(name: str, config: ModelConfig, _: Iterable[int]) -> None:
    hidden, ffn, dim, layers = config.hidden_size, config.intermediate_size, config.head_dim, 4
    heads = config.num_heads + 2 * config.num_kv_heads
    shapes = [(heads * dim, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)]
    weights = [
        [torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02 for shape in shapes] for _ in range(layers)
    ]
    arrays = KVCache(config, max(MANY_ROWS) // 16, 16, torch.bfloat16, "cuda").layers[0]
    print(
        f"\n{name}, us a layer by rows: by the library | ratios, * where the rule takes it: gated by us | turned by us"
    )
    for count in MANY_ROWS:
        x = torch.randn(count, hidden, dtype=torch.bfloat16, device="cuda")
        residual = torch.zeros_like(x)
        turn = Turn(*torch.ones(2, count, 1, dim, device="cuda"), *arrays, torch.arange(count, device="cuda"))

        def layer(gated: bool, turned: bool, x: Tensor = x, residual: Tensor = residual, turn: Turn = turn) -> None:
            for qkv, o, gate_up, down in weights:
                query = turned_product(x, qkv, None, turn) if turned else _turned(F.linear(x, qkv), turn)
                residual.addmm_(query.flatten(1), o.T, beta=0.5)
                hidden = gated_product(x, gate_up) if gated else silu_gate(F.linear(x, gate_up))
                residual.addmm_(hidden, down.T, beta=0.5)

        graphs = [graph_of(lambda way=way: layer(*way)) for way in ((False, False), (True, False), (False, True))]
        library, *ours = (median(times) / layers for times in in_turns(graphs, 40))
        rule = gating_pays(count, weights[0][2]), turning_pays(count, weights[0][0], turn)
        ratios = (f"{each / library:.3f}{'*' if pays else ' '}" for each, pays in zip(ours, rule, strict=True))
        print(str(count).rjust(5), f"{library:8.1f} |", " | ".join(ratios), flush=True)


@torch.inference_mode()
def largest(name: str, config: ModelConfig, _: Iterable[int]) -> None:
    """Of the vocabulary, and of that of an EAGLE-3 head."""
    table = SamplingTable(torch.zeros(1, 16, dtype=torch.int32, device="cuda"))
    print(f"\n{name}, greedy tokens, us by rows: logits and search by the library | ratio, * where the rule takes it")
    for outputs in (config.vocab_size, 32_000):
        weights = [
            torch.randn(outputs, config.hidden_size, dtype=torch.bfloat16, device="cuda") * 0.02
            for _ in range(1 + COLD // (outputs * config.hidden_size * 2))
        ]
        for count in MANY_ROWS:
            x = torch.randn(count, config.hidden_size, dtype=torch.bfloat16, device="cuda")
            slots = torch.zeros(count, dtype=torch.int32, device="cuda")

            ways: tuple[Callable[..., Tensor], ...] = (
                lambda weight, x=x, slots=slots: draw(F.linear(x, weight), slots, slots, table, Mode.GREEDY),
                lambda weight, x=x: largest_of_product(x, weight),
            )
            graphs = [graph_of(lambda way=way, weights=weights: [way(weight) for weight in weights]) for way in ways]
            library, ours = (median(times) / len(weights) for times in in_turns(graphs, 20))
            rule = "*" if largest_pays(count, weights[0]) else " "
            print(f"{outputs:6} {count:5} {library:8.1f} | {ours / library:.3f}{rule}", flush=True)


class Work:
    """One matrix's product with `rows` rows and all that a model does around it, either way."""

    def __init__(self, matrix: str, config: ModelConfig, outputs: int, inputs: int, rows: int) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

        self.outputs = outputs
        self.x = random(rows, inputs)
        self.norm = torch.ones_like(self.x[0]) if matrix in ("qkv", "gate_up") else None
        self.gated = matrix == "gate_up"
        self.residual = random(rows, outputs) if matrix in ("o", "down") else None
        self.turn: Turn | None = None
        if matrix == "qkv":
            slots = torch.arange(rows, device="cuda")
            arrays = KVCache(config, 8, 16, torch.bfloat16, "cuda").layers[0]
            self.turn = Turn(*torch.ones(2, rows, 1, config.head_dim, device="cuda"), *arrays, slots)
        self.fold = rows <= linear.FOLDED_NORM_ROWS
        alone = not self.gated and (self.norm is None or not self.fold)
        self.rule = tiling(outputs, inputs, rows, torch.bfloat16, alone)

    def plans(self) -> list[Tiling]:
        """The rule's, and others of about one wave each."""
        few = len(self.x) <= 16
        others = []
        for width, depth, stages, warps in TILES[few, self.outputs >= 96 * 128]:
            step = (width + (16 if few else 32)) * depth * self.x.element_size()
            together = 2 if 2 * stages * step <= SHARED_MEMORY else 1  # programs of a multiprocessor
            splits = 1
            while (
                2 * splits * -(-self.outputs // width) <= WAVE * together and self.x.shape[1] >= 2 * splits * 2 * depth
            ):
                splits *= 2
            others.append(Tiling(width, depth, splits, stages, warps))
        return [self.rule, *(plan for plan in others if plan != self.rule)]

    def library(self, weight: Tensor) -> Tensor:
        x = self.x if self.norm is None else rms_norm(self.x, self.norm, 1e-5)
        if self.residual is not None:
            return self.residual.addmm_(x, weight.T)
        result = F.linear(x, weight)
        if self.gated:
            return silu_gate(result)
        return result if self.turn is None else _turned(result, self.turn)

    def ours(self, weight: Tensor, plan: Tiling) -> Tensor:
        x, norm = self.x, self.norm
        if norm is not None and not self.fold:
            x, norm = rms_norm(x, norm, 1e-5), None
        fused = {"residual": self.residual, "gated": self.gated, "turn": self.turn}
        return product(x, weight, norm=norm, eps=1e-5, plan=plan, **fused)


def timed(work: Callable[[], object], replays: int = 21) -> float:
    """Microseconds of one run of it inside a CUDA graph, the median."""
    return median(in_turns([graph_of(work)], replays)[0])


def graph_of(work: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """With its results, which have to stay alive so that the graph's memory is not used twice."""
    work()  # compiles, and makes what a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    return graph, kept


def in_turns(graphs: Sequence[tuple[torch.cuda.CUDAGraph, object]], replays: int) -> list[list[float]]:
    """Microseconds of each one's runs."""
    times: list[list[float]] = [[] for _ in graphs]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(replays):
        for (graph, _kept), measured in zip(graphs, times, strict=True):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            measured.append(start.elapsed_time(end) * 1e3)
    return times


@contextmanager
def _fused(limit: int, turned: bool) -> Iterator[None]:
    """Products of up to `limit` rows are our kernel's, which turns queries and keys itself or leaves it to another."""
    before = linear.SKINNY_ROWS, linear.MergedLinear.turned, llama.attend
    linear.SKINNY_ROWS, llama.attend = limit, lambda query, *_: query
    if not turned:
        linear.MergedLinear.turned = lambda layer, x, norm, turn, *_: _turned(layer(x, norm), turn)
    try:
        yield
    finally:
        linear.SKINNY_ROWS, linear.MergedLinear.turned, llama.attend = before


def _turned(qkv: Tensor, turn: Turn) -> Tensor:
    return turn_and_store(*split_qkv(qkv, turn), turn)


def _words(plan: Tiling) -> str:
    return f"{plan.width},{plan.depth},{plan.splits},{plan.stages},{plan.warps}"


def _speed(microseconds: float, weight: Tensor) -> str:
    return f"{microseconds:6.1f} {weight.nbytes / microseconds / 1e6:4.2f}"


if __name__ == "__main__":
    main()
