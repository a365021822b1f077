"""The kernels of a step's trees do what the torch beside their calls does."""

from __future__ import annotations

import random

import pytest
import torch
from tests.runtime.trees import mask, random_tree

from outrider_runtime.engine import device_step, tree_step
from outrider_runtime.engine.feed import AT_THE_END, FeedBuffer, FeedShape, Share, shape_of
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kernels import tree
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.kv.compaction import Path, compact_kv, compact_rows
from outrider_runtime.models.config import ModelConfig, model_config
from outrider_runtime.sampling.candidates import candidates
from outrider_runtime.sampling.noise import gumbel
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.table import Mode, SamplingTable
from outrider_runtime.speculation import verify

SLOTS, WIDTH, SIZE, MOST, DEPTH = 5, 90, 4, 63, 4
VOCAB = 2  # few, so that drafts stand


def tiny() -> ModelConfig:
    return model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": 6,
            "intermediate_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
        }
    )


class Rig:
    """Random texts, trees and tables, twice alike, and a feed about some of them."""

    def __init__(self, seed: int, *, padded: bool) -> None:
        lots = random.Random(seed)
        self.caches = [KVCache(tiny(), 200, SIZE, torch.float32, "cpu") for _ in range(2)]
        self.states = [DeviceState(SLOTS, WIDTH, WIDTH // SIZE, "cpu", tree_tokens=MOST) for _ in range(2)]
        generator = torch.Generator().manual_seed(seed)
        content = torch.randn(self.caches[0].arrays.shape, generator=generator)
        blocks = torch.tensor(lots.sample(range(200), SLOTS * (WIDTH // SIZE)), dtype=torch.int32)
        texts = torch.randint(VOCAB, self.states[0].tokens.shape, generator=generator)
        lengths = torch.randint(1, 20, (SLOTS,), generator=generator)
        parents = torch.zeros(SLOTS, MOST, dtype=torch.int32)
        shares = []
        for slot in lots.sample(range(SLOTS), lots.randint(2, SLOTS)):
            length = int(lengths[slot])
            if lots.random() < 0.7:
                drafts = lots.choice([0, 1, 7, MOST])
                parents[slot, :drafts] = torch.tensor(random_tree(lots, drafts, DEPTH), dtype=torch.int32)
                shares.append(Share(slot, AT_THE_END, 1, drafts, length + lots.randint(0, 70), samples=True))
            else:
                start = lots.randrange(length)
                shares.append(Share(slot, start, length - start, 0, length, samples=lots.random() < 0.5))
        for state, cache in zip(self.states, self.caches, strict=True):
            cache.arrays.copy_(content)
            state.tokens.copy_(texts)
            state.lengths[:SLOTS] = lengths
            state.parents[:SLOTS] = parents
            state.block_tables[:SLOTS] = blocks.view(SLOTS, -1)
        largest = FeedShape(SLOTS, 400, 400, 1)
        shape = largest if padded else shape_of(shares, [])
        self.shares, self.parents = shares, parents
        self.feed = FeedBuffer(largest, SLOTS, torch.device("cpu")).pack(shares, [], shape)
        self.sampled = torch.randint(VOCAB, (max(1, len(self.feed.rows)),), generator=generator, dtype=torch.int32)

    def path(self) -> Path:
        requests = len(self.feed.slots) - 1
        return Path(torch.zeros(requests, dtype=torch.int32), torch.zeros(requests, DEPTH, dtype=torch.int32))


cases = pytest.mark.parametrize(("seed", "padded"), [(seed, bool(seed % 2)) for seed in range(6)])


@cases
def test_branches_are_those_of_the_definition(seed, padded):
    rig = Rig(seed, padded=padded)
    state, feed = rig.states[0], rig.feed
    places = device_step.gather(state, feed, rig.caches[0])[1]
    positions, ancestors = tree_step.branches(state, feed, places, DEPTH)
    found = tree.branches(state.parents, feed.slots, feed.drafts, feed.query_starts, feed.owners, places, DEPTH)
    for one, other in zip(found, (positions, ancestors), strict=True):
        assert one.tolist() == other.tolist()
    for row, share in enumerate(rig.shares):
        begin = int(feed.query_starts[row])
        for number in range(share.length + share.drafts):
            own = mask(rig.parents[share.slot].tolist(), number) if share.drafts else -1
            deep = bin(own & (1 << 64) - 1).count("1") - 1 if share.drafts else number
            assert (int(positions[begin + number] - places[begin]), int(ancestors[begin + number])) == (deep, own)


@cases
def test_frontiers_lie_where_the_definition_says(seed, padded):
    rig = Rig(seed, padded=padded)
    state, requests = rig.states[0], 2
    feed = (rig.feed.slots[:requests], rig.feed.capacities[:requests], rig.feed.drafts[:requests])
    ends = state.lengths[feed[0]]
    found = tree.frontier(ends, state.block_tables, *feed, 3, seed, block_size=SIZE, nowhere=rig.caches[0].nowhere)
    expected = tree_step.frontier_places(state, rig.caches[0], *feed, ends, 3, seed)
    for one, other in zip(found, expected, strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("by_lot", [False, True])
@cases
def test_the_same_drafts_stand_and_what_they_leave_is_moved_alike(seed, padded, by_lot):
    rig = Rig(seed, padded=padded)
    ours, theirs = rig.states
    feed, requests = rig.feed, len(rig.feed.slots) - 1
    meant = torch.arange(requests, dtype=torch.int32)
    stands = torch.arange(requests + 1, dtype=torch.int32) if by_lot else None
    results = [torch.zeros(requests, 3 + MOST, dtype=torch.int32) for _ in range(2)]
    path, expected = rig.path(), rig.path()
    verify.walk_tree(theirs, feed, rig.sampled, meant, results[0], expected, stands)
    tree.commit(
        ours.tokens,
        ours.lengths,
        ours.parents,
        feed.slots,
        feed.drafts,
        feed.capacities,
        feed.first_rows,
        rig.sampled,
        meant,
        results[1],
        path.ends,
        path.nodes,
        stands,
    )
    assert torch.equal(ours.lengths, theirs.lengths)
    assert torch.equal(ours.tokens[:SLOTS, :WIDTH], theirs.tokens[:SLOTS, :WIDTH])
    assert torch.equal(path.ends, expected.ends)
    assert torch.equal(path.nodes, expected.nodes)
    for one, other in zip(*(each.tolist() for each in results), strict=True):
        assert one[: 2 + one[0]] == other[: 2 + one[0]]


def test_what_stands_is_moved_as_by_the_definition():
    rig = Rig(0, padded=False)
    arrays, tables = rig.caches[1].arrays, rig.states[0].block_tables
    slots = torch.tensor([2, 0, 4, 1], dtype=torch.int32)
    numbers = [[1, 2, 3, 4], [2, 3, 9, 40], [1, 7, -1, -1], [-1, -1, -1, -1]]
    path = Path(torch.tensor([3, 16, 1, 9], dtype=torch.int32), torch.tensor(numbers, dtype=torch.int32))
    before = arrays.clone()
    compact_kv(rig.caches[0], tables, slots, path)
    tree.compact_kv(arrays, tables, slots, path.ends, path.nodes, SIZE)
    assert torch.equal(arrays, rig.caches[0].arrays)
    assert not torch.equal(arrays, before)
    rows = [torch.arange(200 * 600).view(200, 600) for _ in range(2)]
    firsts = torch.tensor([0, 50, -1, 150], dtype=torch.int32)
    compact_rows(rows[0], firsts, path)
    tree.compact_rows(rows[1], firsts, path.nodes)
    assert torch.equal(*rows)


def test_logits_get_the_noise_of_their_place():
    table = SamplingTable(torch.zeros(3, 8, dtype=torch.int32))
    table.write(0, SamplingParams(max_tokens=1, temperature=0.7), 5, 1)
    table.write(2, SamplingParams(max_tokens=1, temperature=0.0), 5, 1)
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0))
    slots, positions = torch.tensor([0, 2, 0], dtype=torch.int32), torch.tensor([4, 4, 9], dtype=torch.int32)
    found = tree.with_noise(logits, slots, positions, table)
    expected = logits / 0.7 + gumbel(torch.tensor([5, 5, 5]), positions.long(), 3000)
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=1e-5, atol=2e-5)
    assert torch.equal(found[1], logits[1])
    tokens, _ = candidates(logits, slots, positions, table, Mode.NOISE, 4)
    assert torch.equal(tokens, found.topk(4).indices.int())
