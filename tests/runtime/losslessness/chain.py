"""A tiny language whose next token depends on the last one, written by the real draws and the real verification for
100,000 requests at once; and how often each text should come up, exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import torch
from tests.runtime.sampling.distribution import expected_distribution
from torch import Tensor

from outrider_runtime.engine.device_step import place
from outrider_runtime.engine.feed import AT_THE_END, Feed, FeedBuffer, Share, shape_of
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.engine.tree_step import place_trees
from outrider_runtime.kv.compaction import Path
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.pipeline import Row
from outrider_runtime.sampling.sampler import sample
from outrider_runtime.sampling.table import Layout, SamplingTable, mode_of
from outrider_runtime.speculation.verify import commit, commit_tree

VOCAB = 5
PROMPT = (4, 2)
TOKENS = 3  # of each text: their joint distribution is looked at
K = 2
DRAFTS_OF_TREE = 3
REQUESTS = 100_000

_generator = torch.Generator().manual_seed(3)
TARGET = torch.randn(VOCAB, VOCAB, generator=_generator)  # logits behind each token
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=_generator)

Drafter = Callable[["Chain", Tensor], Tensor]


class Chain:
    """`texts` are what came of it, [REQUESTS, TOKENS]; `first` how often the first draft of all stood, of 1."""

    def __init__(self, params: SamplingParams, drafter: Drafter | None) -> None:
        """Each request has a seed of its own. Without a drafter a step is one token."""
        self.params, self.drafter = params, drafter
        width = len(PROMPT) + TOKENS + DRAFTS_OF_TREE + 1
        self.state = DeviceState(REQUESTS, width, 1, "cpu", DRAFTS_OF_TREE)
        self.state.tokens[:, : len(PROMPT)] = torch.tensor(PROMPT, dtype=torch.int32)
        self.state.lengths[:REQUESTS] = len(PROMPT)
        self.table = self.table_of(1)
        self.slots = feed_of(0).slots[:REQUESTS]
        self.results = torch.zeros(REQUESTS, 3 + K, dtype=torch.int32)
        self.meant = torch.full((REQUESTS,), K, dtype=torch.int32)
        self.first = 0.0
        while int((self.lengths - len(PROMPT)).min()) < TOKENS:
            begin = self.lengths.clone()
            self.step(begin)
            if int(begin.max()) == len(PROMPT):
                self.first = float((self.results[:, 0] > 1).float().mean())
            # All are kept from running on: who has enough begins again where it was.
            self.state.lengths[:REQUESTS] = self.lengths.clamp(max=len(PROMPT) + TOKENS)
        self.texts = self.state.tokens[:REQUESTS, len(PROMPT) : len(PROMPT) + TOKENS].long()

    def step(self, begin: Tensor) -> None:
        """Behind texts of `begin` tokens."""
        drafts = 0
        if self.drafter:
            drafts = K
            for turn in range(K):
                place(self.state, self.slots, begin + turn, self.drafter(self, begin + turn).unsqueeze(1))
        sampled = [self.draw(TARGET, begin + turn, self.table) for turn in range(drafts + 1)]
        commit(self.state, feed_of(drafts), torch.stack(sampled, 1).flatten(), self.meant, self.results)

    @property
    def lengths(self) -> Tensor:
        return self.state.lengths[:REQUESTS]

    def table_of(self, first_seed: int) -> SamplingTable:
        """All slots have the same parameters, and the seeds from `first_seed` on."""
        table = SamplingTable(self.state.tokens[:1], (), Layout(bias=1, ends=1, words=1, word_length=1))
        table.write(0, self.params, 0, len(PROMPT))
        table.tokens = self.state.tokens
        table.rows = table.rows.repeat(len(self.state.tokens), 1)
        table.rows.view(torch.int64)[:, 0] = torch.arange(first_seed, first_seed + len(table.rows))
        return table

    def draw(self, logits: Tensor, positions: Tensor, table: SamplingTable, last: Tensor | None = None) -> Tensor:
        """By these logits, behind the token before each position, or `last`."""
        last = self.before(positions) if last is None else last
        return sample(logits[last.long()], self.slots, positions, table, mode_of(self.params))

    def before(self, positions: Tensor) -> Tensor:
        return self.state.tokens[self.slots.long(), positions.long() - 1]

    def counts(self) -> list[int]:
        """How often each text came up, in the order of probabilities()."""
        return torch.bincount(index(self.texts), minlength=VOCAB**TOKENS).tolist()


class Tree(Chain):
    """Drafts two tokens that may follow a text, and one that may follow the first of them. Without penalties."""

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params, None)

    def step(self, begin: Tensor) -> None:
        one = self.draw(DRAFT, begin, self.table)
        two = (one + 1) % VOCAB
        three = self.draw(DRAFT, begin + 1, self.table, one)
        drafts, parents = torch.stack((one, two, three), 1), torch.tensor([[0, 0, 1]], dtype=torch.int32)
        place_trees(self.state, self.slots, begin, drafts, parents.expand(REQUESTS, -1))
        rows = ((self.before(begin), 0), (one, 1), (two, 1), (three, 2))
        sampled = [self.draw(TARGET, begin + depth, self.table, last) for last, depth in rows]
        path = Path(torch.zeros_like(begin), torch.zeros(REQUESTS, K, dtype=torch.int32))
        feed = feed_of(DRAFTS_OF_TREE)
        commit_tree(self.state, feed, torch.stack(sampled, 1).flatten(), self.meant, self.results, path)


def index(texts: Tensor) -> Tensor:
    return (texts * VOCAB ** torch.arange(TOKENS - 1, -1, -1)).sum(1)


@cache
def feed_of(drafts: int) -> Feed:
    """One that all requests share in: it says nothing of where they are."""
    shares = [Share(slot, AT_THE_END, 1, drafts, 1 << 20, samples=True) for slot in range(REQUESTS)]
    shape = shape_of(shares, [])
    return FeedBuffer(shape, REQUESTS, torch.device("cpu")).pack(shares, [], shape)


def probabilities(params: SamplingParams) -> list[float]:
    """Of each text of TOKENS tokens."""
    found = []
    for text in product(range(VOCAB), repeat=TOKENS):
        probability = 1.0
        for at, token in enumerate(text):
            before = [*PROMPT, *text[:at]]
            row = Row(params, 0, before, len(PROMPT))
            probability *= expected_distribution(TARGET[before[-1]].tolist(), row)[token]
        found.append(probability)
    return found


def with_the_targets_noise(chain: Chain, positions: Tensor) -> Tensor:
    return chain.draw(DRAFT, positions, chain.table)


def with_noise_of_its_own(chain: Chain, positions: Tensor) -> Tensor:
    return chain.draw(DRAFT, positions, chain.table_of(1 << 40))


def always_the_same(chain: Chain, positions: Tensor) -> Tensor:
    return (chain.before(positions) + 1) % VOCAB


DRAFTERS: dict[str, Drafter | None] = {
    "no draft": None,
    "drafts with the target's noise": with_the_targets_noise,
    "drafts with noise of their own": with_noise_of_its_own,
    "drafts without noise": always_the_same,
}
