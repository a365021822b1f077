"""Drafts stand while they are the target's own tokens."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.trees import random_tree, walked

from outrider_runtime.engine.feed import AT_THE_END, FeedBuffer, Share, shape_of
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kv.compaction import Path
from outrider_runtime.speculation.verify import commit, commit_tree

TEXT = [1, 2, 3]
LONGEST = 3


@pytest.mark.parametrize(
    ("drafted", "target", "room", "emitted"),
    [
        ([], [7], 9, [7]),
        ([7], [7, 8], 9, [7, 8]),
        ([6], [7, 8], 9, [7]),
        ([7, 8, 9], [7, 8, 9, 1], 9, [7, 8, 9, 1]),
        ([7, 0, 9], [7, 8, 9, 1], 9, [7, 8]),  # one behind a refused draft does not stand, equal or not
        ([7, 8, 9], [7, 8, 9, 1], 1, [7, 8]),  # the KV of the second draft had no place, so the third row saw none
        ([7, 8], [7, 8, 9], 0, [7]),
    ],
)
def test_what_stands_is_appended(drafted, target, room, emitted):
    state = DeviceState(2, 20, 5, "cpu")
    state.admit(1, TEXT)
    state.tokens[1, len(TEXT) : len(TEXT) + len(drafted)] = torch.tensor(drafted, dtype=torch.int32)
    shares = [Share(1, AT_THE_END, 1, len(drafted), len(TEXT) + room, samples=True)]
    shape = shape_of(shares, [])
    feed = FeedBuffer(shape, state.nobody, torch.device("cpu")).pack(shares, [], shape)
    results = torch.zeros(1, 3 + LONGEST, dtype=torch.int32)
    commit(state, feed, torch.tensor(target), torch.tensor([LONGEST], dtype=torch.int32), results)
    assert results[0, : 2 + len(emitted)].tolist() == [len(emitted), LONGEST, *emitted]
    assert state.tokens[1, : int(state.lengths[1])].tolist() == [*TEXT, *emitted]


@given(seed=st.integers(0, 9999), depth=st.integers(1, 5))
def test_the_targets_tokens_are_followed_down_each_tree(seed, depth):
    """Beside a request that decodes plainly and one that samples nothing."""
    lots = random.Random(seed)
    most, vocab = lots.randint(depth, 12), 3
    state = DeviceState(5, 40, 10, "cpu", tree_tokens=most)
    shares, targets, expected = [], [], []
    for slot in lots.sample(range(5), lots.randint(1, 3)):
        text = lots.choices(range(vocab), k=lots.randint(1, 9))
        drafted = lots.randint(0, most)
        parents = random_tree(lots, drafted, depth)
        drafts = lots.choices(range(vocab), k=drafted)
        room = lots.choice([99, lots.randint(0, drafted)])
        samples = lots.random() < 0.9
        state.admit(slot, text)
        state.tokens[slot, len(text) : len(text) + drafted] = torch.tensor(drafts, dtype=torch.int32)
        state.parents[slot, :drafted] = torch.tensor(parents, dtype=torch.int32)
        shares.append(Share(slot, AT_THE_END, 1, drafted, len(text) + room, samples))
        target = lots.choices(range(vocab), k=1 + drafted) if samples else []
        targets += target
        expected.append((text, target, walked(parents, drafts, target, room) if samples else []))
    shape = shape_of(shares, [])
    feed = FeedBuffer(shape, state.nobody, torch.device("cpu")).pack(shares, [], shape)
    results = torch.zeros(len(shares), 3 + most, dtype=torch.int32)
    path = Path(torch.zeros(len(shares), dtype=torch.int32), torch.zeros(len(shares), depth, dtype=torch.int32))
    meant = torch.arange(len(shares), dtype=torch.int32)
    commit_tree(state, feed, torch.tensor(targets or [0]), meant, results, path)
    for row, (share, (text, target, stands)) in enumerate(zip(shares, expected, strict=True)):
        emitted = [target[number] for number in [0, *stands]] if target else []
        assert results[row, : 2 + len(emitted)].tolist() == [len(emitted), row, *emitted]
        assert state.tokens[share.slot, : int(state.lengths[share.slot])].tolist() == [*text, *emitted]
        assert int(path.ends[row]) == len(text)
        assert path.nodes[row].tolist() == [*stands, *[-1] * (depth - len(stands))]


def test_a_given_number_of_drafts_stands_along_the_first_branch():
    state = DeviceState(1, 40, 10, "cpu", tree_tokens=6)
    state.admit(0, TEXT)
    state.parents[0] = torch.tensor([0, 0, 2, 1, 3, 4], dtype=torch.int32)
    shares = [Share(0, AT_THE_END, 1, 6, 20, samples=True)]
    shape = shape_of(shares, [])
    feed = FeedBuffer(shape, state.nobody, torch.device("cpu")).pack(shares, [], shape)
    results = torch.zeros(1, 9, dtype=torch.int32)
    path = Path(torch.zeros(1, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32))
    meant = torch.tensor([6], dtype=torch.int32)
    commit_tree(state, feed, torch.arange(10, 17), meant, results, path, torch.tensor([2, 0]))
    assert path.nodes.tolist() == [[1, 4, -1]]
    assert results[0, :5].tolist() == [3, 6, 10, 11, 14]
