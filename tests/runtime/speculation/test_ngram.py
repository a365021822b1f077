"""N-gram drafts what followed the latest earlier occurrence of the longest known suffix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider_runtime.engine.request import Request
from outrider_runtime.engine.scheduler import Chunk
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.speculation.ngram import NGram


def request(tokens: list[int], request_id: str = "it") -> Request:
    return Request(request_id, len(tokens), SamplingParams(max_tokens=9), 0, list(tokens), arrival=0.0)


def decode(request: Request, length: int) -> Chunk:
    return Chunk(request, len(request.tokens) - 1, 1, length, decodes=True)


def drafts(tokens: list[int], length: int = 3, shortest: int = 2, longest: int = 3) -> list[int]:
    return NGram(shortest, longest, torch.device("cpu")).propose([decode(request(tokens), length)])[0]


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
        ([], []),
    ],
)
def test_drafted_are(tokens, expected):
    assert drafts(tokens or [3]) == expected


def by_definition(tokens: list[int], length: int, shortest: int, longest: int) -> list[int]:
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                period = tokens[end:]
                return (period * length)[:length]
    return []


texts = st.lists(st.integers(0, 3), min_size=1, max_size=90)


@given(st.lists(st.tuples(texts, st.integers(0, 6)), min_size=1, max_size=5), st.integers(1, 3), st.integers(0, 2))
def test_many_at_once_are_each_as_defined(members, shortest, more):
    chunks = [decode(request(tokens, str(index)), length) for index, (tokens, length) in enumerate(members)]
    found = NGram(shortest, shortest + more, torch.device("cpu")).propose(chunks)
    assert found == [by_definition(tokens, length, shortest, shortest + more) for tokens, length in members]


def test_texts_that_grow_come_and_go_keep_apart():
    proposer = NGram(1, 3, torch.device("cpu"))
    growing = request([1, 2, 3], "growing")
    for step in range(150):
        passing = request([4, 5, 4, step % 3], f"passing-{step}")
        found = proposer.propose([decode(passing, 2), decode(growing, 4)])
        assert found == [
            by_definition(passing.tokens, 2, 1, 3),
            by_definition(growing.tokens, 4, 1, 3),
        ]
        growing.tokens += [step % 7, step % 5]
        proposer.forget(passing)
