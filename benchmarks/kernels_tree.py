"""What trees cost beside a step's models on a CUDA device, in microseconds inside CUDA graphs.

    python benchmarks/kernels_tree.py

At an 8B Llama's shape: growing a tree without its draft model, branches, verification, moving the KV of what stands.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import torch

from outrider_runtime.engine.feed import AT_THE_END, FeedBuffer, FeedShape, Share
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.engine.tree_step import branches
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.kv.compaction import Path, compact_kv
from outrider_runtime.models.config import model_config
from outrider_runtime.sampling.candidates import candidates
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.table import Mode, SamplingTable
from outrider_runtime.speculation.expansion import DynamicTree, Expansion
from outrider_runtime.speculation.verify import commit_tree

VOCAB, SLOTS, WIDTH, SIZE = 128_256, 256, 1024, 16
TREES = (DynamicTree(4, 4, 16), DynamicTree(8, 5, 32), DynamicTree(10, 6, 59))
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}


@torch.inference_mode()
def main() -> None:
    print(torch.__version__, torch.cuda.get_device_name())
    names = ("grow", "grow, noise", "branches", "verify", "move KV", "move none")
    print("top k, depth, tokens  streams", *(name.rjust(12) for name in names))
    cache = KVCache(model_config(SHAPE), 4096, SIZE, torch.bfloat16, "cuda")
    for tree in TREES:
        for streams in (1, 4, 16):
            times = [_microseconds(call) for call in _calls(tree, streams, cache)]
            shape = f"{tree.top_k}, {tree.depth}, {tree.max_tokens}".ljust(21)
            print(shape, str(streams).rjust(8), *(f"{time:12.1f}" for time in times))


def _calls(tree: DynamicTree, streams: int, cache: KVCache) -> list[Callable[[], object]]:
    state = DeviceState(SLOTS, WIDTH, WIDTH // SIZE, "cuda", tree.max_tokens)
    state.lengths.fill_(500)
    state.block_tables.copy_(torch.arange(state.block_tables.numel()).remainder(4096).view_as(state.block_tables))
    parents = [random.Random(0).randint(0, number) for number in range(tree.max_tokens)]
    state.parents.copy_(torch.tensor(parents).expand_as(state.parents))
    table = SamplingTable(state.tokens)
    for slot in range(streams):
        table.write(slot, SamplingParams(max_tokens=1), slot, 1)
    shape = FeedShape(SLOTS, streams * (1 + tree.max_tokens), streams * (1 + tree.max_tokens), 1)
    shares = [Share(slot, AT_THE_END, 1, tree.max_tokens, WIDTH, samples=True) for slot in range(streams)]
    feed = FeedBuffer(shape, SLOTS, torch.device("cuda")).pack(shares, [], shape)
    logits = torch.randn(streams * tree.top_k, VOCAB, device="cuda").mul_(3).to(torch.bfloat16)
    places, results = torch.zeros_like(feed.owners), torch.zeros(SLOTS, 3 + tree.max_tokens, device="cuda").int()
    path = Path(torch.full_like(feed.slots[:-1], 500), torch.zeros(SLOTS, tree.depth, device="cuda").int())
    moves = torch.full_like(path.nodes, -1)
    moves[:streams] = torch.arange(2, 2 + tree.depth)
    meant, sampled = torch.zeros_like(path.ends), torch.zeros_like(feed.owners)

    def grow(mode: Mode) -> Callable[[], object]:
        def call() -> object:
            expansion = Expansion(tree, torch.zeros(streams, dtype=torch.bool, device="cuda"))
            for turn in range(tree.depth):
                width = 1 if turn == 0 else tree.top_k
                slots = feed.slots[:streams].repeat_interleave(width)
                tokens, scores = candidates(logits[: streams * width], slots, slots, table, mode, tree.top_k)
                expansion.grow(tokens.view(streams, width, -1), scores.view(streams, width, -1))
            return expansion.best()

        return call

    return [
        grow(Mode.GREEDY),
        grow(Mode.NOISE),
        lambda: branches(state, feed, places, tree.depth),
        lambda: commit_tree(state, feed, sampled, meant, results, path),
        lambda: compact_kv(cache, state.block_tables, feed.slots[:-1], Path(path.ends, moves)),
        lambda: compact_kv(cache, state.block_tables, feed.slots[:-1], Path(path.ends, moves.clamp(max=1))),
    ]


def _microseconds(call: Callable[[], object], repeats: int = 20) -> float:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats * 1e3)
    return median(times)


if __name__ == "__main__":
    main()
