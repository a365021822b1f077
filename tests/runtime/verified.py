"""A step whose tokens are verified already: what heads that follow the target are extended by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.runtime.tiny import VOCAB
from torch import Tensor

from outrider_runtime.engine.feed import AT_THE_END, Feed, FeedBuffer, FeedShape, Share
from outrider_runtime.engine.state import DeviceState

SLOTS, WIDTH, SIZE = 4, 40, 4
BLOCKS = (SLOTS + 1) * WIDTH // SIZE
SHARES = (
    Share(2, AT_THE_END, 1, 4, capacity=40, samples=True),  # decodes, and its drafts stand in part
    Share(0, 12, 7, 0, capacity=20, samples=True),  # a prompt's last chunk
    Share(1, 3, 6, 0, capacity=12, samples=False),  # an earlier one
)
POSITIONS = [*range(27, 32), *range(12, 19), *range(3, 9)]
LENGTHS = [20, 12, 30, 1, 1]
ENDING = [2, 0]  # the slots of the texts that end within the step


@dataclass(frozen=True, slots=True)
class Verified:
    state: DeviceState
    feed: Feed
    positions: Tensor


def verified_step(tokens: int, device: torch.device | str = "cpu") -> Verified:
    """SHARES, padded to so many tokens."""
    state = DeviceState(SLOTS, WIDTH, WIDTH // SIZE, device)
    texts = torch.randint(VOCAB, state.tokens.shape, generator=torch.Generator().manual_seed(3))
    state.tokens.copy_(texts)
    state.block_tables.copy_(torch.arange(BLOCKS).view_as(state.block_tables))
    state.lengths.copy_(torch.tensor(LENGTHS))
    shape = FeedShape(SLOTS, tokens, 8, 1)
    feed = FeedBuffer(shape, state.nobody, torch.device(device)).pack(SHARES, [], shape)
    padding = [0] * (tokens - len(POSITIONS))
    return Verified(state, feed, torch.tensor([*POSITIONS, *padding], dtype=torch.int32, device=device))
