"""What a model's linear layers and all that surrounds them cost on a CUDA device, inside CUDA graphs, weights cold.

    python benchmarks/kernels_linear.py [stack] [products] [around] [--model 8b|1b] [--rows 1 5 16]

`stack` is a whole model without its attention, by ways of doing it; `products` every matrix by itself, the library's
product beside ours by the rule's tiling and by others; `around` what few large batches need besides products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider_runtime.kernels.activation import silu_gate
from outrider_runtime.kernels.norm import rms_norm
from outrider_runtime.kernels.rope import turn_and_store
from outrider_runtime.kernels.skinny import Tiling, product, tiling
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers import linear
from outrider_runtime.layers.batch import Batch
from outrider_runtime.models import llama
from outrider_runtime.models.config import ModelConfig

ROWS = (1, 2, 5, 8, 16, 32, 64)
COLD = 256 << 20  # bytes of weights between two uses of the same: L2 holds 50 MB
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
    parser.add_argument("parts", nargs="*", choices=["stack", "products", "around", []], default=[])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    given = parser.parse_args()
    parts = {"stack": stack, "products": products, "around": around}
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
    ways = {"library": 0, "fused": 64}  # rows up to which products are our kernel's
    print("rows".rjust(5), *(way.rjust(14) for way in ways))
    for count in rows:
        ids = torch.arange(count, device="cuda")
        batch = Batch(token_ids=ids, positions=ids + 100, slots=ids, attention=())
        times = []
        for limit in ways.values():
            with _skinny_up_to(limit):
                times.append(timed(lambda batch=batch: model.logits(model(batch, cache))))
        print(str(count).rjust(5), *(f"{time / 1e3:14.3f}" for time in times))


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
    for matrix, (outputs, inputs) in shapes.items():
        copies = -(-COLD // (outputs * inputs * 2))
        weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
        norm = torch.ones(inputs, dtype=torch.bfloat16, device="cuda")
        print(f"\n{name} {matrix} {outputs} x {inputs}, us and TB/s; others: width, depth, splits, stages, warps")
        for count in rows:
            x = torch.randn(count, inputs, dtype=torch.bfloat16, device="cuda")
            residual = torch.randn(count, outputs, dtype=torch.bfloat16, device="cuda")
            fused = {
                "qkv": {"norm": norm},
                "gate_up": {"norm": norm, "gated": True},
                "o": {"residual": residual},
                "down": {"residual": residual},
                "head": {},
            }[matrix]
            rule = tiling(outputs, inputs, count, x.dtype, alone=matrix in ("o", "down", "head"))
            library = timed(lambda x=x, ws=weights: [F.linear(x, w) for w in ws]) / copies
            line = [f"library {_speed(library, weights[0])}"]
            for plan in (rule, *_others(rule, few=count <= 16)):
                time = timed(partial(_all, x, weights, plan, fused)) / copies
                line.append(f"{'ours' if plan is rule else _words(plan)} {_speed(time, weights[0])}")
            print(str(count).rjust(5), " | ".join(line), flush=True)


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
        turns = tuple(torch.ones(count, 1, config.head_dim, device="cuda") for _ in range(2))
        slots = torch.arange(count, device="cuda")
        weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
        works: list[Callable[[], object]] = [
            lambda x=x: [F.linear(x, w) for w in down],
            lambda x=x, r=residual: [r + F.linear(x, w) for w in down],
            lambda x=x, r=residual: [r.addmm_(x, w.T) for w in down],
            lambda r=residual, w=weight: [rms_norm(r, w, 1e-5) for _ in down],
            lambda m=merged: [silu_gate(m) for _ in down],
            lambda q=qkv, t=turns, s=slots: [turn_and_store(q, t, *cache, s) for _ in down],
        ]
        print(str(count).rjust(5), " | ".join(f"{timed(work) / len(down):8.2f}" for work in works))


def _all(x: Tensor, weights: list[Tensor], plan: Tiling, fused: dict[str, Any]) -> list[Tensor]:
    return [product(x, weight, plan=plan, **fused) for weight in weights]


def timed(work: Callable[[], object], replays: int = 21) -> float:
    """Microseconds of one run of it inside a CUDA graph, the median."""
    work()  # compiles, and makes what a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()  # results stay alive, so that the graph's memory is not used twice
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    del kept
    return median(times)


@contextmanager
def _skinny_up_to(limit: int) -> Iterator[None]:
    before = linear.SKINNY_ROWS, llama.attend
    linear.SKINNY_ROWS, llama.attend = limit, lambda query, *_: query
    try:
        yield
    finally:
        linear.SKINNY_ROWS, llama.attend = before


def _others(rule: Tiling, few: bool) -> list[Tiling]:
    """A few neighbours of the rule's choice."""
    if rule.width == 128:
        others = [replace(rule, width=64, warps=4, stages=4), replace(rule, stages=4)]
        return [*others, replace(rule, width=64, depth=256, warps=4), replace(rule, warps=4)] if few else others
    other_width = replace(rule, width=96 - rule.width)  # 32 for 64, 64 for 32
    others = [replace(rule, depth=384 - rule.depth, stages=4 if rule.depth == 256 else 3), other_width]
    return [*others, replace(rule, stages=rule.stages + 1), replace(rule, warps=8)] if few else others


def _words(plan: Tiling) -> str:
    return f"{plan.width},{plan.depth},{plan.splits},{plan.stages},{plan.warps}"


def _speed(microseconds: float, weight: Tensor) -> str:
    return f"{microseconds:6.1f} {weight.nbytes / microseconds / 1e6:4.2f}"


if __name__ == "__main__":
    main()
