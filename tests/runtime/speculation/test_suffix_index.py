"""Drafts from what a text or an output says elsewhere: the latest occurrences vote, by definition and incrementally."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_runtime.speculation.suffix_index import DEEPEST, LATEST, SHORTEST, Outputs, Text


def finished(outputs: Outputs, prompt: list[int], output: list[int]) -> None:
    text = Text(prompt, outputs)
    text.extend(output)
    text.finish()


def common(text: list[int], other: list[int], at: int) -> int:
    same = 0
    while same < min(DEEPEST, len(text), at) and text[-1 - same] == other[at - 1 - same]:
        same += 1
    return same


def by_definition(text: list[int], kept: list[tuple[list[int], int]], longest: int, least: float):
    """`kept` are outputs with their prompts, and these prompts' lengths; the latest last."""
    own = [(common(text, text, at), text[at:], True) for at in range(len(text) - 1, SHORTEST - 1, -1)]
    others = [
        (common(text, other, at), other[at:], False)
        for other, begin in reversed(kept)
        for at in range(len(other) - 1, max(begin, SHORTEST) - 1, -1)
    ]
    found = [each for source in (own, others) for each in [one for one in source if one[0] >= SHORTEST][:LATEST]]
    found = [one for one in found if one[0] == DEEPEST][:1] or found
    ways = [
        (length, [way[index % len(way)] for index in range(longest)] if repeats else way[:longest])
        for length, way, repeats in found
    ]
    chain, chances, chance, match = [], [], 1.0, 0
    for index in range(longest):
        ways = [way for way in ways if len(way[1]) > index]
        votes = Counter()
        for length, way in ways:
            votes[way[index]] += 1 if index else length**2
        if not votes:
            break
        token = max(votes, key=votes.__getitem__)
        chance *= votes[token] / votes.total()
        ways = [way for way in ways if way[1][index] == token]
        match = match + 1 if index else max(length for length, _ in ways)
        chance *= match / (match + 2)
        if chance < least:
            break
        chain.append(token)
        chances.append(chance)
    return chain, chances


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [3, 8, 1]),  # what came more often before what came last
        ([1, 2, 4, 9, 1, 2, 3, 8, 1, 2], [3, 8, 1]),  # of equals the latest
        ([5, 6, 1, 2, 3, 8, 7, 1, 2, 4, 9, 7, 1, 2, 4, 9, 5, 6, 1, 2], [3, 8, 7]),  # one long match outweighs two short
        ([1, 3, 4, 5, 2, 3], []),  # one token is too short a match
        ([5, 5, 5], [5, 5, 5]),
        ([7, 1, 2, 1, 2], [1, 2, 1]),  # a repetition goes on beyond the text's end
        ([1], []),
        ([1, 2], []),
    ],
)
def test_a_text_drafts_from_itself(tokens, expected):
    assert list(Text(tokens).draft(3, 0.0).tokens) == expected


def test_the_same_prompt_is_answered_as_before_from_the_first_token_on():
    outputs = Outputs(1000)
    finished(outputs, [1, 2, 3], [7, 8, 9, 10])
    assert list(Text([5, 2, 3], outputs).draft(9, 0.0).tokens) == [7, 8, 9, 10]


def test_of_a_prompt_nothing_is_drafted_for_others():
    outputs = Outputs(1000)
    finished(outputs, [1, 2, 3, 4, 5, 6], [2, 3, 9])
    assert list(Text([8, 2, 3], outputs).draft(4, 0.0).tokens) == [9]  # not [4, 5, 6]
    assert list(Text([8, 5, 6], outputs).draft(4, 0.0).tokens) == [2, 3, 9]  # its output, behind the prompt's end
    for pair in ([1, 2], [3, 4], [4, 5]):
        assert not Text(pair, outputs).draft(4, 0.0).tokens


def test_what_is_not_finished_is_nobody_elses():
    outputs = Outputs(1000)
    Text([1, 2], outputs).extend([7, 8, 9])
    assert not Text([7, 8], outputs).draft(4, 0.0).tokens


def test_a_longer_match_is_likelier_and_every_further_token_less_so():
    chances = []
    for length in range(2, 20):
        text = Text([*range(100, 100 + length), 1, 2, 3, 4, *range(100, 100 + length)])
        chain = text.draft(4, 0.0)
        assert list(chain.chances) == sorted(chain.chances, reverse=True)
        chances.append(chain.chances[0])
    assert chances == sorted(chances)
    assert chances[0] == pytest.approx(0.5)


def test_only_what_is_likely_enough_is_drafted():
    text = Text([*range(10), 1, 2, 3, *range(10)])
    everything = text.draft(8, 0.0)
    for least in (0.3, 0.5, 0.7, 0.9, 1.0):
        kept = [token for token, chance in zip(*everything, strict=True) if chance >= least]
        assert list(text.draft(8, least).tokens) == kept
    assert len(text.draft(8, 0.5).tokens) in range(1, 8)


def test_an_output_too_long_to_keep_is_not_kept():
    outputs = Outputs(10)
    finished(outputs, [1, 2], [*range(20)])
    assert outputs.size == 0
    finished(outputs, [1, 2], [7, 8, 9])
    assert outputs.size == 5


def test_the_oldest_output_is_forgotten_first():
    outputs = Outputs(100)
    for number in range(50):
        finished(outputs, [0], [1000 + number, 2000 + number, *range(10 * number, 10 * number + 7)])
        assert outputs.size <= 100
    drafted = [bool(Text([1000 + number, 2000 + number], outputs).draft(4, 0.0).tokens) for number in range(50)]
    assert drafted == [False] * 40 + [True] * 10


def test_memory_is_bounded_however_much_is_finished():
    outputs, draw = Outputs(500), random.Random(1)
    for _ in range(300):
        finished(outputs, [0], [draw.randrange(1000) for _ in range(draw.randrange(60))])
        assert outputs.size <= 500
        assert len(outputs._heads) <= outputs.size
    assert len(outputs._texts) < 50


tokens = st.integers(0, 3)
a_prompt = st.lists(tokens, min_size=1, max_size=60)


@given(
    prompt=a_prompt,
    pieces=st.lists(st.lists(tokens, max_size=5), max_size=12),
    before=st.lists(st.tuples(a_prompt, st.lists(tokens, max_size=60)), max_size=6),
    capacity=st.integers(1, 300),
    longest=st.integers(1, 6),
    least=st.sampled_from([0.0, 0.1, 0.3]),
)
def test_drafts_are_as_defined_however_the_texts_came(prompt, pieces, before, capacity, longest, least):
    outputs, kept = Outputs(capacity), []
    for question, answer in before:
        finished(outputs, question, answer)
        context = question[-DEEPEST:]
        if answer and len(answer) <= capacity:
            kept.append(([*context, *answer], len(context)))
            while sum(len(tokens) for tokens, _ in kept) > capacity:
                kept.pop(0)
    assert outputs.size == sum(len(tokens) for tokens, _ in kept)
    text, written = Text(prompt, outputs), [*prompt]
    for piece in [[], *pieces]:
        text.extend(piece)
        written += piece
        drafted = text.draft(longest, least)
        chain, chances = by_definition(written, kept, longest, least)
        assert list(drafted.tokens) == chain
        assert list(drafted.chances) == pytest.approx(chances)


def test_of_the_longest_matches_the_latest_counts():
    phrase = [*range(100, 100 + DEEPEST)]
    text = Text([*phrase, 1, 1, *phrase, 1, 2, *phrase, 3, 3, *phrase])
    assert list(text.draft(2, 0.0).tokens) == [3, 3]
    text.extend([7, *phrase[-5:]])  # a short match: the most count
    assert text.draft(2, 0.0).tokens[0] == 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=100), st.integers(1, 100))
def test_a_prompt_is_taken_in_at_once_as_it_would_be_token_by_token(written, cut):
    whole, grown = Text(written), Text(written[:cut])
    grown.extend(written[cut:])
    assert whole.tokens == grown.tokens == array("i", written)
    assert whole._links == grown._links
    assert whole._heads == grown._heads


def test_chances_are_what_comes_true_where_texts_are_from_a_source_with_a_memory():
    """A Markov chain of order 2 whose next token is one of two, three times in four the first."""
    draw = random.Random(3)
    written, expected, stood, drafted = [0, 1], 0.0, 0, 0
    text = Text(written)
    for _ in range(4000):
        token = (written[-1] * 7 + written[-2] * 3 + (draw.random() < 0.25)) % 20
        if drafts := text.draft(1, 0.0):
            for guess, chance in zip(*drafts, strict=True):
                expected, drafted, stood = expected + chance, drafted + 1, stood + (guess == token)
        text.extend([token])
        written.append(token)
    assert drafted > 3000
    assert math.isclose(expected / drafted, stood / drafted, abs_tol=0.15)
