"""What the device knows of every running request, by slot.

A step's shape comes from the host, what it is about from here: where a request's text ends is known on the device a
step before the host learns of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DeviceState:
    """`tokens` and `lengths` are the texts: prompt and generated tokens that stand. Behind a text's end lie, during a
    step, its drafts; `parents` are theirs, as speculation/tree.py numbers them, where they form trees. One slot more
    than requests, `nobody`, and one column more than tokens take what is padding. `counting` is 0, 1, 2 and so on:
    where requests of one token each begin."""

    def __init__(self, slots: int, width: int, blocks: int, device: torch.device | str, tree_tokens: int = 0) -> None:
        """For `slots` requests of at most `width` tokens, drafts included, in at most `blocks` KV blocks. Trees have at
        most `tree_tokens` drafts; 0: there are none."""
        self.nobody = slots
        self.width = width
        self.tokens = torch.zeros(slots + 1, width + 1, dtype=torch.int32, device=device)
        self.lengths = torch.ones(slots + 1, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(slots + 1, blocks, dtype=torch.int32, device=device)
        self.counting = torch.arange(slots + 2, dtype=torch.int32, device=device)
        self.parents = torch.zeros(slots + 1, tree_tokens, dtype=torch.int32, device=device)

    def admit(self, slot: int, tokens: Sequence[int]) -> None:
        """A request's text so far; its blocks come with the steps that use them."""
        text = torch.tensor([len(tokens), *tokens], dtype=torch.int32)
        if self.tokens.is_cuda:
            text = text.pin_memory()
        text = text.to(self.tokens.device, non_blocking=True)
        self.lengths[slot : slot + 1] = text[:1]
        self.tokens[slot, : len(tokens)] = text[1:]
