"""Drafts from the request's own text: what followed the latest earlier occurrence of its longest known suffix.

(Prompt lookup decoding, Saxena 2023.) All requests are matched at once over one buffer of tokens on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider_runtime.engine.request import Request
from outrider_runtime.engine.scheduler import Chunk


def match_suffixes(tokens: Tensor, lengths: Tensor, shortest: int, longest: int) -> Tensor:
    """Where each text goes on after the best earlier match of its suffix, [rows]; 0 where there is none.

    `tokens` is [rows, width], of which `lengths` [rows] count. The longest match wins, up to `longest` tokens; among
    equals the latest, whose continuation begins before the text's end.
    """
    rows, width = tokens.shape
    ends = torch.arange(1, width + 1, device=tokens.device)  # a match that ends before token `end` goes on with it
    matched = torch.zeros(rows, width, dtype=torch.int64, device=tokens.device)
    alive = ends < lengths.unsqueeze(1)
    for back in range(longest):
        suffix = tokens.gather(1, (lengths - 1 - back).clamp(min=0).unsqueeze(1))
        shifted = torch.full_like(tokens, -1)
        shifted[:, back:] = tokens[:, : width - back] if back else tokens
        alive = alive & (shifted == suffix)
        matched += alive
    score = torch.where(matched >= shortest, matched * width + ends, 0)
    best, where = score.max(dim=1)
    return torch.where(best > 0, ends[where], 0)


class NGram:
    """Looks up, for each request, at most `max_model_len` tokens of prompt and generated text."""

    name = "ngram"

    def __init__(self, shortest: int, longest: int, device: torch.device) -> None:
        self._shortest, self._longest = shortest, longest
        self._texts = TokenBuffer(device)

    def propose(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        drafting = [chunk for chunk in chunks if chunk.draft_length > 0]
        drafts: dict[str, list[int]] = {}
        if drafting:
            tokens, lengths = self._texts.read([chunk.request for chunk in drafting])
            starts = match_suffixes(tokens, lengths, self._shortest, self._longest)
            # A continuation that reaches the end of the text goes on with itself: what repeats is repeated.
            offsets = torch.arange(max(chunk.draft_length for chunk in drafting), device=tokens.device)
            period = (lengths - starts).unsqueeze(1)
            followed = tokens.gather(1, starts.unsqueeze(1) + offsets % period)
            found = zip(drafting, followed.tolist(), starts.tolist(), strict=True)
            drafts = {chunk.request.request_id: row[: chunk.draft_length] for chunk, row, start in found if start}
        return [drafts.get(chunk.request.request_id, []) for chunk in chunks]

    def observe(self, requests: Sequence[Request]) -> None:
        pass  # texts are read when drafting

    def forget(self, request: Request) -> None:
        self._texts.forget(request)


class TokenBuffer:
    """The texts of the requests that draft, each in a row that only its new tokens are copied to."""

    def __init__(self, device: torch.device) -> None:
        self._tokens = torch.zeros(1, 64, dtype=torch.int64, device=device)
        self._rows: dict[str, int] = {}
        self._copied: dict[str, int] = {}
        self._free = [0]

    def read(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """[requests, longest text] tokens, and their lengths."""
        self._make_room(requests)
        where: list[tuple[int, int, int]] = []
        for request in requests:
            if request.request_id not in self._rows:
                self._rows[request.request_id] = self._free.pop()
            row, copied = self._rows[request.request_id], self._copied.get(request.request_id, 0)
            where += [(row, index, request.tokens[index]) for index in range(copied, len(request.tokens))]
            self._copied[request.request_id] = len(request.tokens)
        device = self._tokens.device
        rows, columns, tokens = torch.tensor(where, dtype=torch.int64, device=device).view(-1, 3).unbind(1)
        self._tokens[rows, columns] = tokens
        lengths = torch.tensor([len(request.tokens) for request in requests], device=device)
        own = torch.tensor([self._rows[request.request_id] for request in requests], device=device)
        return self._tokens[own, : max(len(request.tokens) for request in requests)], lengths

    def forget(self, request: Request) -> None:
        if (row := self._rows.pop(request.request_id, None)) is not None:
            del self._copied[request.request_id]
            self._free.append(row)

    def _make_room(self, requests: Sequence[Request]) -> None:
        """Double rows or width until these requests fit."""
        rows, width = self._tokens.shape
        new = sum(request.request_id not in self._rows for request in requests)
        more = 0
        while new > len(self._free) + more:
            more = max(1, rows, 2 * more)
        wider = width
        while wider < max(len(request.tokens) for request in requests):
            wider *= 2
        if more or wider > width:
            grown = torch.zeros(rows + more, wider, dtype=torch.int64, device=self._tokens.device)
            grown[:rows, :width] = self._tokens
            self._tokens = grown
            self._free += range(rows, rows + more)
