"""A tree of drafts is verified in one step as if the target had decoded token by token: same tokens, same KV."""

from __future__ import annotations

import random

import pytest
import torch
from tests.runtime.tiny import VOCAB, ours, reference_model
from tests.runtime.trees import random_tree

from outrider_runtime.engine.device_step import gather_batch
from outrider_runtime.engine.feed import AT_THE_END, Feed, FeedBuffer, FeedShape, Share, shape_of
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.engine.tree_step import frontier_batch, gather_tree_batch, place_trees
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.kv.compaction import Path, compact_kv, compact_rows
from outrider_runtime.models.causal import CausalLM
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.sampler import sample
from outrider_runtime.sampling.table import Mode, SamplingTable
from outrider_runtime.speculation.expansion import Frontier
from outrider_runtime.speculation.verify import commit_tree

SLOTS, WIDTH, SIZE, MOST, DEPTH = 3, 120, 4, 20, 5
PADDED = FeedShape(SLOTS, 90, 70, 4)


class Machine:
    """Texts of a tiny target in double precision, decoded by trees or plainly."""

    def __init__(self, model: CausalLM, texts: list[list[int]]) -> None:
        blocks = WIDTH // SIZE
        self.model = model
        self.cache = KVCache(model.config, SLOTS * blocks, SIZE, model.dtype, "cpu")
        self.state = DeviceState(SLOTS, WIDTH, blocks, "cpu", tree_tokens=MOST)
        self.table = SamplingTable(self.state.tokens)
        self.buffer = FeedBuffer(PADDED, SLOTS, torch.device("cpu"))
        order = torch.randperm(SLOTS * blocks, generator=torch.Generator().manual_seed(3)).to(torch.int32)
        self.state.block_tables[:SLOTS] = order.view(SLOTS, blocks)
        for slot, text in enumerate(texts):
            self.state.admit(slot, text)
            self.table.write(slot, SamplingParams(max_tokens=99, temperature=0.8 * (slot > 0)), slot, len(text))
        self.results = torch.zeros(SLOTS, 3 + MOST, dtype=torch.int32)
        self.path = Path(torch.zeros(SLOTS, dtype=torch.int32), torch.zeros(SLOTS, DEPTH, dtype=torch.int32))

    def read(self) -> None:
        shares = [Share(slot, 0, len(text) - 1, 0, WIDTH, False) for slot, text in enumerate(self.texts())]
        feed = self.buffer.pack(shares, [], shape_of(shares, []))
        self.model(gather_batch(self.state, feed, self.cache, self.model.attention_shape, small=False), self.cache)

    def step(self, drafts: list[list[int]], parents: list[list[int]], *, padded: bool = False) -> None:
        shares = [Share(slot, AT_THE_END, 1, len(own), WIDTH, True) for slot, own in enumerate(drafts)]
        feed = self.buffer.pack(shares, [], PADDED if padded else shape_of(shares, []))
        ends = self.state.lengths[:SLOTS].clone()
        filled = [torch.tensor([[*row, *[0] * (MOST - len(row))] for row in each]).int() for each in (drafts, parents)]
        place_trees(self.state, feed.slots[: len(shares)], ends, *filled)
        self.verify(feed)

    def verify(self, feed: Feed) -> None:
        shape = self.model.attention_shape
        places = torch.zeros_like(feed.owners)
        batch = gather_tree_batch(self.state, feed, self.cache, shape, places, small=True, depth=DEPTH)
        hidden = self.model(batch, self.cache).clone()
        slots, positions = feed.slots[feed.owners[feed.rows]], batch.positions[feed.rows] + 1
        sampled = sample(self.model.logits(hidden[feed.rows]), slots, positions, self.table, Mode.NOISE)
        requests = len(feed.slots) - 1
        meant = torch.zeros(requests, dtype=torch.int32)
        commit_tree(self.state, feed, sampled, meant, self.results[:requests], self.path)
        compact_kv(self.cache, self.state.block_tables, feed.slots[:-1], self.path)
        compact_rows(hidden, feed.query_starts[:-1], self.path)
        self.hidden = [hidden[start:] for start in feed.query_starts.tolist()[:SLOTS]]

    def texts(self) -> list[list[int]]:
        lengths = self.state.lengths[:SLOTS].tolist()
        return [self.state.tokens[slot, :length].tolist() for slot, length in enumerate(lengths)]

    def kv(self) -> list[torch.Tensor]:
        """Of each text but its last token."""
        found = []
        for slot, text in enumerate(self.texts()):
            positions = torch.arange(len(text) - 1)
            places = self.state.block_tables[slot, positions // SIZE] * SIZE + positions % SIZE
            found.append(self.cache.arrays[:, :, places.long()])
        return found


def plainly(model: CausalLM, texts: list[list[int]], tokens: int) -> Machine:
    machine = Machine(model, texts)
    machine.read()
    for _ in range(tokens):
        machine.step([[]] * SLOTS, [[]] * SLOTS)
    return machine


@pytest.fixture(scope="module", params=[None, 8])
def model(request) -> CausalLM:
    if request.param is None:
        return ours(reference_model(), torch.float64)
    reference = reference_model("MistralForCausalLM", sliding_window=request.param)
    return ours(reference, torch.float64)


def test_trees_yield_the_tokens_and_the_kv_of_plain_decoding(model):
    """Trees that hold the right continuation in part, at random places; greedy and drawn with noise."""
    lots = random.Random(0)
    texts = [lots.choices(range(VOCAB), k=length) for length in (5, 14, 22)]
    truth = plainly(model, texts, 30)
    machine = Machine(model, texts)
    machine.read()
    stood = 0
    for turn in range(5):
        drafts, parents = [], []
        for text, right in zip(machine.texts(), truth.texts(), strict=True):
            tree = random_tree(lots, lots.choice([0, 3, MOST]), DEPTH)
            tokens, depths = [], [0]
            for parent in tree:
                depths.append(depths[parent] + 1)
                likely = right[len(text) + depths[parent]]
                tokens.append(likely if lots.random() < 0.6 else lots.randrange(VOCAB))
            drafts.append(tokens)
            parents.append(tree)
        before = machine.texts()
        machine.step(drafts, parents, padded=turn % 2 == 1)
        for slot, (text, right) in enumerate(zip(machine.texts(), truth.texts(), strict=True)):
            assert text == right[: len(text)]
            emitted = len(text) - len(before[slot])
            assert int(machine.results[slot, 0]) == emitted
            assert machine.results[slot, 2 : 2 + emitted].tolist() == text[-emitted:]
            stood += emitted - 1
    assert stood > 8
    for kv, right in zip(machine.kv(), truth.kv(), strict=True):
        torch.testing.assert_close(kv, right[:, :, : kv.shape[2]], rtol=1e-9, atol=1e-9)


def test_hidden_states_move_to_where_a_chain_has_them(model):
    """What a draft that follows the target reads of a step: the same as if the branch had been drafted alone."""
    texts = [[1, 2, 3]] * SLOTS
    right = plainly(model, texts, 4).texts()
    behind = [text[3:6] for text in right]
    chain, tree = Machine(model, texts), Machine(model, texts)
    for machine in (chain, tree):
        machine.read()
    chain.step(behind, [[0, 1, 2]] * SLOTS)
    wrong = (behind[0][0] + 1) % VOCAB
    tree.step([[wrong, own[0], wrong, own[1], wrong, own[2]] for own in behind], [[0, 0, 1, 2, 2, 4]] * SLOTS)
    for one, other in zip(chain.hidden, tree.hidden, strict=True):
        torch.testing.assert_close(other[:4], one[:4], rtol=1e-9, atol=1e-9)


def test_a_draft_reads_frontiers_as_it_reads_each_branch_alone(model):
    texts = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    machine = Machine(model, texts)
    shares = [Share(slot, AT_THE_END, 1, 9, WIDTH, True) for slot in range(SLOTS)]
    feed = machine.buffer.pack(shares, [], PADDED)
    ends = machine.state.lengths[:SLOTS]
    reading = [Share(slot, 0, len(text), 0, WIDTH, False) for slot, text in enumerate(texts)]
    reader = FeedBuffer(PADDED, SLOTS, torch.device("cpu")).pack(reading, [], shape_of(reading, []))
    model(gather_batch(machine.state, reader, machine.cache, model.attention_shape, small=False), machine.cache)
    tokens = torch.randint(VOCAB, (3, SLOTS, 2), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    sources = [[0, 0], [1, 0], [1, 1]]
    ancestors = torch.zeros(1, dtype=torch.int64)
    branches: list[list[int]] = [[]]
    for turn in range(3):
        source = torch.tensor(sources[turn])
        ancestors = ancestors[source] | (1 << (2 * turn + torch.arange(2)))
        frontier = Frontier(tokens[turn], source.expand(SLOTS, 2), ancestors.expand(SLOTS, 2))
        shape = model.attention_shape
        batch, positions = frontier_batch(machine.state, feed, machine.cache, shape, ends, frontier, turn)
        assert positions.view(SLOTS, 2)[:, 0].tolist() == (ends + turn).tolist()
        hidden = model(batch, machine.cache).view(SLOTS, 2, -1)
        branches = [[*branches[source], 2 * turn + rank] for rank, source in enumerate(sources[turn])]
        for slot, text in enumerate(texts):
            for rank, branch in enumerate(branches):
                alone = Machine(model, [[*text, *tokens.transpose(0, 1)[slot].flatten()[branch].tolist()], [0], [0]])
                span = [Share(0, 0, len(text) + turn + 1, 0, WIDTH, False)]
                whole = alone.buffer.pack(span, [], shape_of(span, []))
                expected = model(gather_batch(alone.state, whole, alone.cache, shape, small=False), alone.cache)
                torch.testing.assert_close(hidden[slot, rank], expected[-1], rtol=1e-9, atol=1e-9)
