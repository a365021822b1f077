"""The few kernels around a step do what the torch beside their calls does, padding and all."""

from __future__ import annotations

import random

import pytest
import torch

from outrider_runtime.engine import device_step
from outrider_runtime.engine.feed import AT_THE_END, FeedBuffer, FeedShape, Share, shape_of
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kernels import step
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.models.config import ModelConfig, model_config
from outrider_runtime.speculation import verify
from outrider_runtime.speculation.greedy import by_halves

SLOTS, WIDTH, SIZE, LONGEST = 6, 40, 4, 3
VOCAB = 3  # few, so that drafts stand


def tiny() -> ModelConfig:
    return model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
        }
    )


class Rig:
    """A state of random texts and tables, twice alike, and a feed about some of them."""

    def __init__(self, seed: int, *, padded: bool) -> None:
        lots = random.Random(seed)
        self.cache = KVCache(tiny(), 50, SIZE, torch.float32, "cpu")
        self.states = [DeviceState(SLOTS, WIDTH, WIDTH // SIZE, "cpu") for _ in range(2)]
        generator = torch.Generator().manual_seed(seed)
        for name, most in (("tokens", VOCAB), ("lengths", WIDTH - 8), ("block_tables", 50)):
            values = torch.randint(
                1 if name == "lengths" else 0, most, getattr(self.states[0], name).shape, generator=generator
            )
            for state in self.states:
                getattr(state, name).copy_(values)
                state.lengths[state.nobody] = 1
        shares = [self._share(lots, slot) for slot in lots.sample(range(SLOTS), lots.randint(1, SLOTS))]
        updates = [(share.slot, index, lots.randrange(50)) for share in shares for index in range(lots.randint(0, 2))]
        largest = FeedShape(SLOTS, 80, 30, 20)
        shape = largest if padded else shape_of(shares, updates)
        self.feed = FeedBuffer(largest, SLOTS, torch.device("cpu")).pack(shares, updates, shape)
        self.sampled = torch.randint(0, VOCAB, (max(1, len(self.feed.rows)),), generator=generator, dtype=torch.int32)

    def _share(self, lots: random.Random, slot: int) -> Share:
        length = int(self.states[0].lengths[slot])
        if lots.random() < 0.6:
            capacity = length + lots.randint(0, 4)
            return Share(slot, AT_THE_END, 1, lots.randint(0, LONGEST), capacity, samples=True)
        start = lots.randrange(length)
        samples, written = lots.random() < 0.5, start + lots.randint(0, 1)
        return Share(slot, start, lots.randint(1, length - start), 0, length, samples, written)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_tables_tokens_and_places_are_those_of_the_definition(seed, padded):
    rig = Rig(seed, padded=padded)
    ours, theirs = rig.states
    device_step.update_tables(theirs, rig.feed)
    step.update_tables(ours.block_tables, rig.feed.update_slots, rig.feed.update_indices, rig.feed.update_blocks)
    assert torch.equal(ours.block_tables[:SLOTS], theirs.block_tables[:SLOTS])
    places = torch.zeros_like(rig.feed.owners) if padded else None
    found = step.gather(
        ours.tokens,
        ours.lengths,
        ours.block_tables,
        rig.feed.slots,
        rig.feed.starts,
        rig.feed.capacities,
        rig.feed.written,
        rig.feed.query_starts,
        rig.feed.owners,
        places,
        block_size=SIZE,
        nowhere=rig.cache.nowhere,
    )
    expected = device_step.gather(theirs, rig.feed, rig.cache)
    for one, other in zip(found, expected, strict=True):
        assert one.tolist() == other.tolist()
    assert places is None or places.tolist() == expected[1].tolist()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_drawn_is_drawn_where_the_definition_says(seed, padded):
    rig = Rig(seed, padded=padded)
    owners, positions = rig.feed.owners, torch.arange(90, dtype=torch.int32)
    found = step.drawing(rig.feed.slots, owners, rig.feed.rows, positions)
    for one, other in zip(found, device_step.drawing(rig.feed, owners, positions), strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_tails_of_texts_are_those_of_the_definition(seed, count):
    rig = Rig(seed, padded=True)
    state, requests = rig.states[0], 4
    feed = (rig.feed.slots[:requests], rig.feed.capacities[:requests], rig.feed.drafts[:requests])
    ends = state.lengths[feed[0]]
    ends[0] = 1
    found = step.tails(state.tokens, ends, state.block_tables, *feed, count, block_size=SIZE, nowhere=rig.cache.nowhere)
    for one, other in zip(found, device_step.tails(state, rig.cache, *feed, ends, count), strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("turns", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_where_drafts_will_lie_is_as_the_definition_says(seed, turns):
    rig = Rig(seed, padded=True)
    state, requests = rig.states[0], 5
    feed = (rig.feed.slots[:requests], rig.feed.capacities[:requests], rig.feed.drafts[:requests])
    found = step.drafts_ahead(
        state.lengths, state.block_tables, *feed, turns, block_size=SIZE, nowhere=rig.cache.nowhere
    )
    for one, other in zip(found, device_step.drafts_ahead(state, rig.cache, *feed, turns), strict=True):
        assert one.tolist() == other.tolist()


def test_drafts_are_placed_behind_texts_and_never_past_the_last_column():
    ours, theirs = Rig(0, padded=True).states
    slots = torch.tensor([2, 0, 5], dtype=torch.int32)
    first = torch.tensor([7, WIDTH - 1, 0], dtype=torch.int32)
    drafts = torch.tensor([[1, 2], [1, 2], [2, 1]], dtype=torch.int32)
    device_step.place(theirs, slots, first, drafts)
    step.place(ours.tokens, slots, first, drafts)
    assert torch.equal(ours.tokens, theirs.tokens)


def test_lots_are_drawn_as_the_definition_says():
    rig = Rig(0, padded=True)
    state = rig.states[0]
    lots = verify.draw_lots(2.5, SLOTS + 1, "cpu")
    expected = verify.stands_by_lot(state, rig.feed, lots)
    assert step.stands_by_lot(state.lengths, rig.feed.slots, lots).tolist() == expected.tolist()


@pytest.mark.parametrize("by_lot", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_greedy_tokens_are_there_as_far_as_they_count(seed, padded, by_lot):
    rig = Rig(seed, padded=padded)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(rig.feed.owners), 64, generator=generator).half()
    weight = torch.zeros(2 * (VOCAB + VOCAB % 2), 64).half()
    weight[:VOCAB] = torch.randn(VOCAB, 64, generator=generator).half()
    every = (hidden.double() @ weight.double().T).argmax(1).to(torch.int32)[rig.feed.rows]
    requests = len(rig.feed.slots) - 1
    stands = torch.arange(requests + 1, dtype=torch.int32) % (LONGEST + 1) if by_lot else None
    sampled = by_halves(weight, hidden, rig.states[0], rig.feed, stands)
    results = [torch.zeros(requests, 3 + LONGEST, dtype=torch.int32) for _ in range(2)]
    for state, tokens, result in zip(rig.states, (sampled, every), results, strict=True):
        verify.walk(state, rig.feed, tokens, torch.zeros(requests, dtype=torch.int32), result, stands)
    emitted = results[1][:, 0].tolist()
    assert emitted == results[0][:, 0].tolist()
    for row, count in enumerate(emitted):
        assert results[0][row, 2 : 2 + count].tolist() == results[1][row, 2 : 2 + count].tolist()
    assert torch.equal(*(state.tokens[:SLOTS, :WIDTH] for state in rig.states))


def test_rows_that_count_are_first_halves_then_what_is_left_where_those_stand():
    shares = [Share(slot, AT_THE_END, 1, drafts, 30, samples=slot != 2) for slot, drafts in enumerate((4, 1, 0, 0, 4))]
    feed = FeedBuffer(FeedShape(6, 20, 16, 1), 5, torch.device("cpu")).pack(shares, [], FeedShape(6, 20, 16, 1))
    state = DeviceState(5, WIDTH, WIDTH // SIZE, "cpu")
    state.lengths.fill_(7)
    state.tokens[:, 7:11] = torch.tensor([5, 6, 7, 8])
    about = state.tokens, state.lengths, feed.slots, feed.drafts, feed.first_rows, feed.rows
    sampled = torch.zeros(16, dtype=torch.int32)
    places, tokens, count = step.rows_that_count(*about, sampled, None, rest=False)
    # 5 rows, 2, 1 and 5, and 3 of nobody's; the request without a row has a token
    assert places[: int(count)].tolist() == [0, 1, 2, 5, 7, 8, 9, 10, 13, 14, 15]
    assert tokens.tolist() == [0, 1, 2, 5, 8, 9, 10, 11, *[0] * 8]
    sampled[:3], sampled[5], sampled[8:11] = torch.tensor([5, 6, 7]), 9, torch.tensor([5, 6, 9])
    places, tokens, count = step.rows_that_count(*about, sampled, None, rest=True)
    assert (places[: int(count)].tolist(), tokens.tolist()) == ([3, 4], [3, 4, *[0] * 6])
    stands = torch.tensor([2, 1, 0, 0, 3, 0], dtype=torch.int32)
    places, tokens, count = step.rows_that_count(*about, sampled, stands, rest=True)
    assert (places[: int(count)].tolist(), tokens.tolist()) == ([6, 11, 12], [6, 12, 13, *[0] * 5])


@pytest.mark.parametrize("by_lot", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_drafts_stand_as_by_the_definition(seed, padded, by_lot):
    rig = Rig(seed, padded=padded)
    ours, theirs = rig.states
    requests = len(rig.feed.slots) - 1
    meant = torch.arange(requests, dtype=torch.int32)
    stands = torch.arange(requests + 1, dtype=torch.int32) % (LONGEST + 1) if by_lot else None
    results = [torch.zeros(requests, 3 + LONGEST, dtype=torch.int32) for _ in range(2)]
    verify.walk(theirs, rig.feed, rig.sampled, meant, results[0], stands)
    step.commit(
        ours.tokens,
        ours.lengths,
        rig.feed.slots,
        rig.feed.drafts,
        rig.feed.capacities,
        rig.feed.first_rows,
        rig.sampled,
        meant,
        results[1],
        stands,
    )
    assert torch.equal(ours.lengths, theirs.lengths)
    assert torch.equal(ours.tokens[:SLOTS, :WIDTH], theirs.tokens[:SLOTS, :WIDTH])
    emitted = results[0][:, 0].tolist()
    assert emitted == results[1][:, 0].tolist()
    for row, count in enumerate(emitted):
        assert results[0][row, 1 : 2 + count].tolist() == results[1][row, 1 : 2 + count].tolist()
