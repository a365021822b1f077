"""On a CUDA device a step's trees are what the torch beside the kernels says, at real sizes and inside graphs."""

from __future__ import annotations

import random

import pytest
import torch
from tests.gpu.marks import ON_A_GPU
from tests.runtime.trees import random_tree

from outrider_runtime.engine import tree_step
from outrider_runtime.engine.device_step import gather
from outrider_runtime.engine.feed import AT_THE_END, Feed, FeedBuffer, FeedShape, Share
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.kv.compaction import Path, compact_kv, compact_rows
from outrider_runtime.models.config import model_config
from outrider_runtime.sampling.candidates import candidates
from outrider_runtime.sampling.noise import gumbel
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.table import Mode, SamplingTable
from outrider_runtime.speculation.expansion import DynamicTree, Expansion
from outrider_runtime.speculation.verify import commit_tree

pytestmark = ON_A_GPU

SLOTS, WIDTH, SIZE, MOST, DEPTH, VOCAB = 16, 400, 16, 63, 6, 3
LARGEST = FeedShape(SLOTS, 1024, 1024, 1)
CONFIG = model_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 4096,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    }
)


class Twin:
    """The same random texts, trees and KV on a device."""

    def __init__(self, device: str, seed: int) -> None:
        lots = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.cache = KVCache(CONFIG, SLOTS * WIDTH // SIZE, SIZE, torch.bfloat16, device)
        self.cache.arrays.copy_(torch.randn(self.cache.arrays.shape, generator=generator))
        self.state = DeviceState(SLOTS, WIDTH, WIDTH // SIZE, device, tree_tokens=MOST)
        order = torch.randperm(SLOTS * WIDTH // SIZE, generator=generator).view(SLOTS, -1)
        self.state.block_tables[:SLOTS] = order.to(torch.int32)
        self.state.tokens.copy_(torch.randint(VOCAB, self.state.tokens.shape, generator=generator))
        self.state.lengths[:SLOTS] = torch.randint(1, 300, (SLOTS,), generator=generator)
        shares = []
        for slot in lots.sample(range(SLOTS), 12):
            drafts = lots.choice([0, 5, 26, MOST])
            parents = random_tree(lots, drafts, DEPTH)
            self.state.parents[slot, :drafts] = torch.tensor(parents, dtype=torch.int32)
            length = int(self.state.lengths[slot])
            shares.append(Share(slot, AT_THE_END, 1, drafts, length + lots.choice([9, WIDTH]), samples=True))
        self.feed = FeedBuffer(LARGEST, SLOTS, torch.device(device)).pack(shares, [], LARGEST)
        self.sampled = torch.randint(VOCAB, (LARGEST.rows,), generator=generator, dtype=torch.int32).to(device)
        self.rows = torch.randn(LARGEST.tokens, 4096, generator=generator).to(torch.bfloat16).to(device)
        self.meant = torch.arange(SLOTS, dtype=torch.int32, device=device)
        self.results = torch.zeros(SLOTS, 3 + MOST, dtype=torch.int32, device=device)
        empty = torch.zeros(SLOTS, 1 + DEPTH, dtype=torch.int32, device=device)
        self.path = Path(empty[:, 0].clone(), empty[:, 1:].clone())

    def verify(self) -> None:
        commit_tree(self.state, self.feed, self.sampled, self.meant, self.results, self.path)
        compact_kv(self.cache, self.state.block_tables, self.feed.slots[:-1], self.path)
        compact_rows(self.rows, self.feed.query_starts[:-1], self.path)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_drafts_stand_and_what_they_leave_is_moved_alike(seed):
    ours, theirs = Twin("cuda", seed), Twin("cpu", seed)
    for twin in (ours, theirs):
        twin.verify()
    assert (theirs.path.nodes > 1).any()
    assert torch.equal(ours.path.nodes.cpu(), theirs.path.nodes)
    assert torch.equal(ours.path.ends.cpu(), theirs.path.ends)
    assert torch.equal(ours.state.lengths.cpu(), theirs.state.lengths)
    assert torch.equal(ours.state.tokens.cpu()[:SLOTS, :WIDTH], theirs.state.tokens[:SLOTS, :WIDTH])
    assert torch.equal(ours.cache.arrays.cpu(), theirs.cache.arrays)
    assert torch.equal(ours.rows.cpu(), theirs.rows)
    for one, other in zip(ours.results.tolist(), theirs.results.tolist(), strict=True):
        assert one[: 2 + one[0]] == other[: 2 + one[0]]


def test_branches_and_frontiers_are_those_of_the_definition():
    ours, theirs = Twin("cuda", 0), Twin("cpu", 0)
    places = gather(theirs.state, theirs.feed, theirs.cache)[1]
    expected = tree_step.branches(theirs.state, theirs.feed, places, DEPTH)
    found = tree_step.branches(ours.state, ours.feed, places.cuda(), DEPTH)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)

    def frontier(feed: Feed, twin: Twin) -> tuple[torch.Tensor, ...]:
        from outrider_runtime.kernels import tree  # Triton, which a machine without a GPU may lack

        slots, capacities, drafts = feed.slots[:4], feed.capacities[:4], feed.drafts[:4]
        ends = twin.state.lengths[slots]
        if twin is theirs:
            return tree_step.frontier_places(twin.state, twin.cache, slots, capacities, drafts, ends, 10, 2)
        at = {"block_size": SIZE, "nowhere": twin.cache.nowhere}
        return tree.frontier(ends, twin.state.block_tables, slots, capacities, drafts, 10, 2, **at)

    for one, other in zip(frontier(ours.feed, ours), frontier(theirs.feed, theirs), strict=True):
        assert torch.equal(one.cpu(), other)


def test_logits_get_the_noise_of_their_place():
    table = SamplingTable(torch.zeros(2, 8, dtype=torch.int32, device="cuda"))
    table.write(0, SamplingParams(max_tokens=1, temperature=0.7), 5, 1)
    table.write(1, SamplingParams(max_tokens=1, temperature=0.0), 5, 1)
    logits = torch.randn(8, 128_256, device="cuda", dtype=torch.bfloat16)
    slots = torch.tensor([0, 1] * 4, dtype=torch.int32, device="cuda")
    positions = torch.arange(8, dtype=torch.int32, device="cuda")
    tokens, confidences = candidates(logits, slots, positions, table, Mode.NOISE, 10)
    scores = logits.double() / 0.7 + gumbel(torch.full((8,), 5, device="cuda"), positions.long(), 128_256)
    scores[1::2] = logits[1::2].double()
    expected = scores.log_softmax(-1)
    torch.testing.assert_close(confidences.double(), expected.gather(1, tokens.long()), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(confidences.double(), expected.topk(10).values, rtol=1e-4, atol=1e-4)


def test_a_tree_grows_verifies_and_moves_inside_a_graph():
    """Nothing of it looks back at the host, and replays follow what has changed."""
    twin = Twin("cuda", 1)
    tree = DynamicTree(top_k=8, depth=DEPTH, max_tokens=MOST)
    slots, ends = twin.feed.slots[:4], torch.zeros(4, dtype=torch.int32, device="cuda")
    logits = torch.randn(DEPTH, 32, 1000, device="cuda")
    table = SamplingTable(twin.state.tokens)
    drafted = torch.zeros(4, MOST, dtype=torch.int32, device="cuda")

    def step() -> None:
        ends.copy_(twin.state.lengths[slots])
        expansion = Expansion(tree, torch.zeros(4, dtype=torch.bool, device="cuda"))
        for turn in range(DEPTH):
            width = 1 if turn == 0 else tree.top_k
            rows, owners = logits[turn, : 4 * width], slots.repeat_interleave(width)
            tokens, scores = candidates(rows, owners, owners, table, Mode.NOISE, tree.top_k)
            expansion.grow(tokens.view(4, width, -1), scores.view(4, width, -1))
        drafts, parents = expansion.best()
        drafted.copy_(drafts)
        tree_step.place_trees(twin.state, slots, ends, drafts % VOCAB, parents)
        twin.verify()

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    seen = []
    for seed in (3, 4):
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        parents, numbers = twin.state.parents[slots], torch.arange(MOST, device="cuda")
        assert (parents <= numbers).all()
        seen.append(drafted.clone())
    assert not torch.equal(*seen)
