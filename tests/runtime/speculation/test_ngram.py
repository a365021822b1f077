"""N-gram drafts what followed the latest earlier occurrence of the longest known suffix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider_runtime.speculation.ngram import continuations


def drafts(texts: list[list[int]], length: int = 3, shortest: int = 2, longest: int = 3) -> list[list[int]]:
    """Each text in a slot of its own, in a buffer whose rest is other tokens."""
    width = max(map(len, texts)) + 5
    buffer = torch.tensor([text + [1] * (width - len(text)) for text in [[], *texts]], dtype=torch.int32)
    slots = torch.arange(1, len(texts) + 1, dtype=torch.int32)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    tokens, found = continuations(buffer, slots, lengths, length, shortest, longest)
    return [row if own else [] for row, own in zip(tokens.tolist(), found.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], [4, 8, 1]),  # the latest of equals
        ([0, 1, 2, 3, 9, 9, 1, 2, 4, 0, 1, 2], [3, 9, 9]),  # the longest before the latest
        ([1, 3, 4, 5, 2, 3], []),  # one token is too short a match
        ([5, 5, 5], [5, 5, 5]),
        ([7, 1, 2, 1, 2], [1, 2, 1]),  # a repetition goes on beyond the text's end
        ([1], []),
    ],
)
def test_drafted_are(tokens, expected):
    assert drafts([tokens]) == [expected]


def by_definition(tokens: list[int], length: int, shortest: int, longest: int) -> list[int]:
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                period = tokens[end:]
                return (period * length)[:length]
    return []


texts = st.lists(st.integers(0, 3), min_size=1, max_size=90)


@given(st.lists(texts, min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2))
def test_many_at_once_are_each_as_defined(members, length, shortest, more):
    found = drafts(members, length, shortest, shortest + more)
    assert found == [by_definition(tokens, length, shortest, shortest + more) for tokens in members]
