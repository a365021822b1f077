"""Which programs are captured as CUDA graphs, and in what order: first what a server meets at once, then the rest.

A capture takes a tenth of a second, so a server that waited for hundreds would not be ready for a minute. Whatever is
met before its turn is captured then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from outrider_runtime.graphs import bucket
from outrider_runtime.sampling.table import Mode
from outrider_runtime.speculation.allocation import Captured

COMMON_REQUESTS = (16, 8, 4, 2, 1)  # running ones that a server meets first
FEW_QUERIES = 17  # a token and the longest chain of drafts


@dataclass(frozen=True, slots=True)
class Forward:
    """The target over so many tokens. `small`: no request brings more than a few; `narrow`: not more than one."""

    tokens: int
    small: bool
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """Logits, tokens and verification of so many rows."""

    rows: int
    mode: Mode
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """The whole loop: `length` tokens for each of so many requests."""

    requests: int
    length: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class DraftRead:
    """The draft model over so many tokens of texts."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Extend:
    """A draft that follows the target, over its step's tokens."""

    tokens: int
    small: bool


Program = Forward | Sample | Draft | DraftRead | Extend


@dataclass(frozen=True, slots=True)
class Widths:
    """What is captured of each, ascending. No `lengths`: nothing drafts. `reads`: the draft reads texts by itself;
    `extends`: it follows the target."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    requests: tuple[int, ...]
    lengths: tuple[int, ...]
    reads: bool
    extends: bool = False
    draft_sizes: tuple[int, ...] = ()  # drafts by turns, where they are not as many

    def drafts(self, turns: int) -> int:
        return self.draft_sizes[turns] if self.draft_sizes else turns

    @property
    def few(self) -> int:
        """Tokens of a request in a step that counts as small: whatever decodes brings no more."""
        return max(FEW_QUERIES, 1 + max(self.draft_sizes, default=0))


def first(widths: Widths, draft_tokens: int) -> list[Program]:
    """What a server must not be without when it is ready: a long prompt, and a few requests that decode plainly or
    draft as many tokens as the policy in force says. The widest of each kind come first: what they need of the pool
    serves the others."""
    common = [requests for requests in COMMON_REQUESTS if requests <= widths.requests[-1]]
    drafts = widths.drafts(draft_tokens)
    turns = (1, 1 + drafts) if drafts else (1,)
    by_turn = {turn: [bucket(widths.rows, min(n * turn, widths.rows[-1])) for n in common] for turn in turns}
    tokens = sorted({width for each in by_turn.values() for width in each})[::-1]
    programs: list[Program] = [Forward(widths.tokens[-1], small=False)]
    if widths.reads:
        programs.append(DraftRead(widths.tokens[-1]))
    programs += [
        Forward(bucket(widths.tokens, width), small=True, narrow=turn == 1)
        for turn in reversed(turns)
        for width in by_turn[turn]
    ]
    programs += [Sample(width, mode) for mode in Mode for width in tokens]
    if widths.lengths and draft_tokens:
        length = bucket(widths.lengths, draft_tokens)
        modes = (Mode.GREEDY, Mode.NOISE)
        programs += [Draft(bucket(widths.requests, n), length, mode) for n in common for mode in modes]
        programs += _extends(widths, programs)
    return list(dict.fromkeys(programs))


def rest(widths: Widths, done: list[Program]) -> list[Program]:
    """All others but rare ones: drafts of many requests with top-p and the like, and log-probabilities. Soonest met are
    the shorter drafts of a few requests, at their ends."""
    few = {bucket(widths.requests, n) for n in COMMON_REQUESTS if n <= widths.requests[-1]}
    loops = [
        Draft(requests, length, mode)
        for length in reversed(widths.lengths)
        for mode in Mode
        for requests in reversed(widths.requests)
    ]
    programs: list[Program] = [*(loop for loop in loops if loop.requests in few)]
    programs += [
        Forward(width, small=True, narrow=narrow)
        for width in reversed(widths.tokens)
        for narrow in (True, False)
        if not narrow or width <= widths.requests[-1]
    ]
    programs += [Sample(width, mode) for mode in Mode for width in reversed(widths.rows)]
    programs += [Forward(width, small=False) for width in reversed(widths.tokens) if width > widths.few]
    programs += [DraftRead(width) for width in reversed(widths.tokens) if widths.reads]
    programs += [loop for loop in loops if loop.mode is not Mode.FULL]
    programs = [*_extends(widths, programs), *programs]
    known = set(done)
    return [program for program in dict.fromkeys(programs) if program not in known]


def _extends(widths: Widths, programs: list[Program]) -> list[Program]:
    """One for each width of the target's."""
    if not widths.extends:
        return []
    return [Extend(each.tokens, each.small) for each in programs if isinstance(each, Forward)]


def wanted(widths: Widths, requests: int, longest: int, mode: Mode) -> Iterator[Program]:
    """What so many requests need to draft up to so many tokens each: the most first."""
    for length in reversed(widths.lengths):
        tokens = requests * (1 + widths.drafts(length))
        if length <= longest and tokens <= widths.rows[-1]:
            width = bucket(widths.tokens, tokens)
            programs: list[Program] = [Forward(width, small=True), Sample(bucket(widths.rows, tokens), mode)]
            yield from programs
            yield from _extends(widths, programs)
            yield Draft(bucket(widths.requests, requests), length, mode)


def captured_sizes(widths: Widths, captured: Callable[[Program], bool], mode: Mode, small: bool) -> Captured:
    """What a step may be padded to without capturing anything, if it samples in this way and is small or not.

    Of one that also reads a prompt, fewer rows than tokens are sampled: how many is not looked at."""
    rows = widths.rows[-1]
    tokens = [
        captured(Forward(width, small))
        and (not small or width > widths.requests[-1] or captured(Forward(width, small, narrow=True)))
        and (not widths.extends or captured(Extend(width, small)))
        and (not small or captured(Sample(bucket(widths.rows, min(width, rows)), mode)))
        for width in widths.tokens
    ]
    loops = [[captured(Draft(requests, length, mode)) for requests in widths.requests] for length in widths.lengths]
    return Captured(
        np.array(widths.tokens), np.array(widths.requests), np.array(widths.lengths), np.array(tokens), np.array(loops)
    )
