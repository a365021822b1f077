"""Drafts stand while they are the target's own tokens."""

from __future__ import annotations

import pytest
import torch

from outrider_runtime.engine.feed import AT_THE_END, FeedBuffer, Share, shape_of
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.speculation.verify import commit

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
