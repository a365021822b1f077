"""Where the end of a text has occurred before, in itself or in finished outputs, and how it went on: drafts.

It answers what a suffix tree does (SuffixDecoding, Oliaro et al., arXiv 2411.04975), laid out for Python, where a tree
or an automaton takes 11 us and 350 bytes a token. Every occurrence of two tokens knows the one before it, as in a
compressor's match finder: one look-up a token. How much more matches is found out when it is asked, of the latest few
occurrences only, and these vote on what comes next.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

TOKEN_BITS = 21  # of a token id, and of a position in a text
SHORTEST = 2  # tokens that match
DEEPEST = 32  # tokens beyond these count no more
LATEST = 4  # occurrences that vote, of the text and of the outputs each: with 16 drafts are 0.3 % longer

_POSITION = (1 << TOKEN_BITS) - 1


class Chain(NamedTuple):
    """What may follow a text, and for each token the chance that it and all before it do."""

    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()


NOTHING = Chain()
# Tokens that a text ends with and that end before position `at` of others: how many, those others, and `at`. A tuple,
# since it is made several times a token.
_Occurrence = tuple[int, "array[int]", int]


class Outputs:
    """Finished outputs, of which the oldest are forgotten first. What drafts were of use has come again in the output
    that they were drafts for, so it is among the latest."""

    def __init__(self, capacity: int) -> None:
        """For `capacity` tokens in all, with each output the end of its prompt."""
        self.size = 0
        self._capacity = capacity
        self._texts: dict[int, tuple[array[int], array[int]]] = {}  # tokens, and links
        self._oldest = self._next = 1
        self._heads: dict[int, int] = {}  # where two tokens occurred last, as links say it

    def add(self, tokens: array[int], prompt_length: int) -> None:
        """Of a text that has ended. Its prompt is not kept but for the last tokens, which say when its output begins
        and are never drafted."""
        if len(tokens) <= prompt_length or len(tokens) - prompt_length > self._capacity:
            return
        begin = max(0, prompt_length - DEEPEST)
        tokens = tokens[begin:]
        links = array("q", bytes(8 * len(tokens)))
        heads, number = self._heads, self._next << TOKEN_BITS
        for at in range(max(prompt_length - begin, SHORTEST), len(tokens)):
            key = tokens[at - 2] << TOKEN_BITS | tokens[at - 1]
            links[at] = heads.get(key, 0)
            heads[key] = number | at
        self._texts[self._next] = (tokens, links)
        self._next += 1
        self.size += len(tokens)
        while self.size > self._capacity:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        tokens, _ = self._texts.pop(self._oldest)
        self._oldest += 1
        self.size -= len(tokens)
        heads, first = self._heads, self._oldest << TOKEN_BITS
        for before, last in pairwise(tokens):
            key = before << TOKEN_BITS | last
            if heads.get(key, first) < first:
                del heads[key]

    def find(self, text: array[int], found: list[_Occurrence]) -> None:
        """Add the latest occurrences of the end of `text` to `found`, the latest first."""
        end = len(text)
        link = self._heads.get(text[end - 2] << TOKEN_BITS | text[end - 1], 0)
        for _ in range(LATEST):
            output = self._texts.get(link >> TOKEN_BITS)
            if output is None:  # or forgotten, and all before it
                break
            at = link & _POSITION
            tokens, links = output
            found.append((common_end(text, end, tokens, at), tokens, at))
            link = links[at]


class Text:
    """A prompt and what is generated behind it. Nobody else drafts from it before it is among the outputs."""

    def __init__(self, prompt: Sequence[int], outputs: Outputs | None = None) -> None:
        """`outputs` None: drafts are of the text itself only."""
        self.tokens = array("i", prompt)
        self._prompt_length = len(prompt)
        self._outputs = outputs
        self._links, self._heads = _link(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        links, heads = self._links, self._heads
        before = self.tokens[-1]
        self.tokens.extend(tokens)
        end = len(links)
        for token in tokens:
            key = before << TOKEN_BITS | token
            links.append(heads.get(key, 0))
            heads[key] = end
            before = token
            end += 1

    def finish(self) -> None:
        """What was generated is drafted from for others from now on."""
        if self._outputs is not None:
            self._outputs.add(self.tokens, self._prompt_length)

    def draft(self, longest: int, least: float) -> Chain:
        """Up to `longest` tokens, as far as the chance of each is `least`.

        The first is the one with the most votes, of which an occurrence has the square of its matched length; those
        further on the one with the most among the occurrences that agree so far. Ties go to whoever was found first:
        in the text before the outputs, and late before early; and the first whose match is DEEPEST decides alone. A
        token's chance, given those before it, is its share of the votes times m / (m + 2) where m tokens match, drafts
        included: what replayed code and chats show.
        """
        tokens = self.tokens
        end = len(tokens)
        found: list[_Occurrence] = []
        at = self._links[end]
        while at and len(found) < LATEST:
            found.append((common_end(tokens, end, tokens, at), tokens, at))
            at = self._links[at]
        if self._outputs is not None and end >= SHORTEST:
            self._outputs.find(tokens, found)
        return _vote(found, tokens, longest, least) if found else NOTHING


def common_end(text: array[int], end: int, other: array[int], at: int) -> int:
    """How many tokens before `end` and before `at` are the same, up to DEEPEST; the last SHORTEST are known to be."""
    most = min(end, at, DEEPEST)
    if most == SHORTEST or text[end - 3] != other[at - 3]:
        return SHORTEST
    if text[end - most : end] == other[at - most : at]:
        return most
    length = SHORTEST + 1
    while text[end - 1 - length] == other[at - 1 - length]:
        length += 1
    return length


def _vote(found: Sequence[_Occurrence], text: array[int], longest: int, least: float) -> Chain:
    match, tokens, at = found[0]
    first, chance = tokens[at], 1.0
    if len(found) > 1:
        first, chance, found = _most(found)
        match = max([length for length, _, _ in found])
    chance *= match / (match + 2)
    if chance < least:
        return NOTHING
    chain, chances = [first], [chance]
    ways = [_continuation(tokens, at, text, longest) for _, tokens, at in found]
    if ways.count(ways[0]) == len(ways):
        del ways[1:]  # they agree to the end
    while len(chain) < longest:
        index = len(chain)
        if len(ways) > 1:
            ways = [way for way in ways if len(way) > index]
            votes = [way[index] for way in ways]
            if not votes:
                break
            token = max(votes, key=votes.count)
            if (count := votes.count(token)) < len(votes):
                ways = [way for way in ways if way[index] == token]
                chance *= count / len(votes)
        elif len(ways[0]) > index:
            token = ways[0][index]
        else:
            break
        match += 1
        chance *= match / (match + 2)
        if chance < least:
            break
        chain.append(token)
        chances.append(chance)
    return Chain(chain, chances)


def _most(found: Sequence[_Occurrence]) -> tuple[int, float, list[_Occurrence]]:
    """The token that most votes are for, its share of them, and whose they are."""
    votes: dict[int, int] = {}
    total = 0
    for each in found:
        length, tokens, at = each
        if length == DEEPEST:
            return tokens[at], 1.0, [each]
        weight, token = length * length, tokens[at]
        total += weight
        votes[token] = votes.get(token, 0) + weight
    if len(votes) == 1:
        return token, 1.0, [*found]
    token = max(votes, key=votes.__getitem__)
    return token, votes[token] / total, [each for each in found if each[1][each[2]] == token]


def _continuation(tokens: array[int], at: int, text: array[int], longest: int) -> array[int]:
    """What follows; one that reaches the text's own end goes on with itself, since what repeats is repeated."""
    following = tokens[at : at + longest]
    if tokens is text and len(following) < longest:
        following *= -(-longest // len(following))
    return following


def _link(tokens: Sequence[int]) -> tuple[array[int], dict[int, int]]:
    """For each position the one before it that follows the same two tokens, or 0, and the last of all: extend()'s
    work for a whole prompt at once."""
    links = np.zeros(len(tokens) + 1, dtype=np.int32)
    ids = np.array(tokens, dtype=np.int64)
    keys = ids[:-1] << TOKEN_BITS | ids[1:]
    order = keys.argsort(kind="stable")
    again = keys[order[1:]] == keys[order[:-1]]
    links[order[1:][again] + SHORTEST] = order[:-1][again] + SHORTEST
    return array("i", links.tobytes()), dict(zip(keys.tolist(), range(SHORTEST, len(tokens) + 1), strict=True))
