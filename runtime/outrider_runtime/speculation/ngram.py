"""Drafts from the request's own text: what followed the latest earlier occurrence of its longest known suffix.

(Prompt lookup decoding, Saxena 2023.) All requests are matched at once, in the device's texts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider_runtime.engine.device_step import place
from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.sampling.table import Mode
from outrider_runtime.speculation.proposer import Proposer


def match_suffixes(tokens: Tensor, lengths: Tensor, shortest: int, longest: int) -> Tensor:
    """Where each text goes on after the best earlier match of its suffix, [rows]; 0 where there is none.

    `tokens` is [rows, width], of which `lengths` [rows] count. The longest match wins, up to `longest` tokens; among
    equals the latest, whose continuation begins before the text's end.
    """
    rows, width = tokens.shape
    ends = torch.arange(1, width + 1, device=tokens.device)  # a match that ends before token `end` goes on with it
    matched = torch.zeros(rows, width, dtype=torch.int64, device=tokens.device)
    alive = ends < lengths.unsqueeze(1)
    for back in range(min(longest, width)):
        suffix = tokens.gather(1, (lengths - 1 - back).clamp(min=0).unsqueeze(1))
        shifted = torch.full_like(tokens, -1)
        shifted[:, back:] = tokens[:, : width - back] if back else tokens
        alive = alive & (shifted == suffix)
        matched += alive
    score = torch.where(matched >= shortest, matched * width + ends, 0)
    best, where = score.max(dim=1)
    return torch.where(best > 0, ends[where], 0)


class NGram(Proposer):
    name = "ngram"

    def __init__(self, state: DeviceState, shortest: int, longest: int) -> None:
        self._state = state
        self._shortest, self._longest = shortest, longest

    def draft(self, feed: Feed, requests: int, length: int, mode: Mode) -> Tensor:
        slots = feed.slots[:requests]
        ends = self._state.lengths[slots]
        drafts, found = continuations(self._state.tokens, slots, ends, length, self._shortest, self._longest)
        place(self._state, slots, ends, drafts)
        return torch.where(found, length, 0).to(torch.int32)


def continuations(
    texts: Tensor, slots: Tensor, lengths: Tensor, count: int, shortest: int, longest: int
) -> tuple[Tensor, Tensor]:
    """`count` tokens that may follow each text, [rows, count], and whether there was a match, [rows]."""
    if texts.is_cuda:
        from outrider_runtime.kernels import ngram  # Triton, which a CPU does without

        return ngram.continuations(texts, slots, lengths, count, shortest, longest)
    texts = texts[:, : int(lengths.max())]
    tokens, lengths = texts[slots].long(), lengths.long()
    starts = match_suffixes(tokens, lengths, shortest, longest)
    # A continuation that reaches the end of the text goes on with itself: what repeats is repeated.
    offsets = torch.arange(count, device=tokens.device)
    period = (lengths - starts).unsqueeze(1)
    return tokens.gather(1, starts.unsqueeze(1) + offsets % period), starts > 0
