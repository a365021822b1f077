"""The kernel drafts what followed the latest earlier occurrence of the longest known suffix."""

from __future__ import annotations

import pytest
import torch

from outrider_runtime.kernels import ngram

WIDTH = 90


def by_definition(tokens: list[int], count: int, shortest: int, longest: int) -> list[int] | None:
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return (tokens[end:] * count)[:count]
    return None


def drafts(texts: list[list[int]], count: int, shortest: int, longest: int) -> list[list[int] | None]:
    """Texts lie in slots in reverse; what lies behind them is junk that would match."""
    buffer = torch.zeros(len(texts), WIDTH, dtype=torch.int32)
    for slot, text in enumerate(reversed(texts)):
        buffer[slot] = torch.tensor((text * WIDTH)[:WIDTH], dtype=torch.int32)
    slots = torch.arange(len(texts) - 1, -1, -1, dtype=torch.int32)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    drafted, found = ngram.continuations(buffer, slots, lengths, count, shortest, longest)
    assert drafted.dtype == torch.int32
    for text, row in zip(texts, drafted.tolist(), strict=True):
        assert set(row) <= set(text)
    return [row if any_found else None for row, any_found in zip(drafted.tolist(), found.tolist(), strict=True)]


@pytest.mark.parametrize(("block", "count", "shortest", "longest"), [(4096, 1, 1, 1), (16, 5, 2, 4), (16, 3, 3, 3)])
def test_texts_of_every_length_continue_as_defined(block, count, shortest, longest, monkeypatch):
    """A block of 16 makes a text of 80 tokens many: matches lie within them, between them, and in several."""
    monkeypatch.setattr(ngram, "BLOCK", block)
    generator = torch.Generator().manual_seed(count)
    texts = [
        torch.randint(kinds, (length,), generator=generator).tolist()
        for kinds in (2, 5)
        for length in (1, 2, 3, 16, 17, 48, 80)
    ]
    assert drafts(texts, count, shortest, longest) == [by_definition(text, count, shortest, longest) for text in texts]


def test_the_longest_comes_before_the_latest_also_from_another_block(monkeypatch):
    monkeypatch.setattr(ngram, "BLOCK", 16)
    text = [1, 2, 3, 7, *[0] * 30, 2, 3, 9, *[0] * 20, 1, 2, 3]
    assert drafts([text], 2, 1, 3) == [[7, 0]]
    assert drafts([text], 2, 1, 2) == [[9, 0]]
