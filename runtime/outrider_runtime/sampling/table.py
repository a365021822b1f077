"""The sampling parameters of the running requests, on the device, a row for each slot.

Written once, when a request is admitted; every step after it finds them by slot, without a look at the host.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from outrider_runtime.sampling.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

COLDEST = 1e-6  # temperature; below, quotients leave float32's range and the text is greedy's anyway
HEADER = struct.Struct("=q6f6i")  # as Settings reads it
HEADER_WORDS = HEADER.size // 4
NOBODY = SamplingParams(max_tokens=1, temperature=0.0)


class Mode(IntEnum):
    """How much of the pipeline a batch needs: the most that any of its requests does."""

    GREEDY = 0  # the largest logit
    NOISE = 1  # temperature and noise; greedy requests may be among them
    FULL = 2


def mode_of(params: SamplingParams) -> Mode:
    """What one request needs."""
    if (
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.bad_words
        or params.min_tokens
    ):
        return Mode.FULL
    if params.temperature <= 0:
        return Mode.GREEDY  # the likeliest survives top-k, top-p and min-p
    return Mode.FULL if truncates(params) else Mode.NOISE


def truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How many of what a row has room for. A row is int32 words: the header, bias ids, bias values, ids that end a
    request, and bad words, each of `word_length` and filled from its end; -1 is nothing."""

    bias: int = MAX_LOGIT_BIAS
    ends: int = MAX_STOP_TOKEN_IDS
    words: int = MAX_BAD_WORDS
    word_length: int = MAX_BAD_WORD_TOKENS

    @property
    def bias_ids(self) -> int:
        return HEADER_WORDS

    @property
    def bias_values(self) -> int:
        return self.bias_ids + self.bias

    @property
    def end_ids(self) -> int:
        return self.bias_values + self.bias

    @property
    def bad_words(self) -> int:
        return self.end_ids + self.ends

    @property
    def width(self) -> int:
        return (self.bad_words + self.words * self.word_length + 1) // 2 * 2  # even: seeds are of two words


def reads_text(params: SamplingParams) -> bool:
    """Whether what the request draws depends on which tokens stand before, not only on how many. In a tree several
    may stand there; so these requests draft chains."""
    return bool(
        params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty or params.bad_words
    )


class Settings:
    """Rows of a table, [rows, words] int32, by the names of what is in them; each is [rows]."""

    def __init__(self, rows: Tensor) -> None:
        floats = rows.view(torch.float32)
        self.seeds = rows.view(torch.int64)[:, 0]
        self.temperature, self.top_p, self.log_min_p = floats[:, 2], floats[:, 3], floats[:, 4]
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = floats[:, 5:8].unbind(1)
        self.top_k, self.prompt_length, self.min_tokens = rows[:, 8:11].unbind(1)
        self.bad_words = rows[:, 13]  # their number

    @property
    def reads_text(self) -> Tensor:
        """reads_text() of each, bool."""
        penalised = (self.repetition_penalty != 1) | (self.presence_penalty != 0) | (self.frequency_penalty != 0)
        return penalised | (self.bad_words > 0)


class SamplingTable:
    """`rows` [slots, words] int32, and `tokens` [slots, width] int32: the texts, which penalties and bad words read.

    A slot that was never written is greedy.
    """

    def __init__(self, tokens: Tensor, eos_token_ids: Collection[int] = (), layout: Layout | None = None) -> None:
        """`tokens` is the engine's own buffer, read at every step."""
        self.tokens = tokens
        self.layout = layout or Layout(ends=MAX_STOP_TOKEN_IDS + len(eos_token_ids))
        self._eos_token_ids = tuple(eos_token_ids)
        nobody = self._packed(NOBODY, 0, 0)
        self.rows = nobody.to(tokens.device).expand(tokens.shape[0], -1).contiguous()

    def write(self, slot: int, params: SamplingParams, seed: int, prompt_length: int) -> None:
        """A request is admitted: its text's first `prompt_length` tokens are the prompt. `seed` may be any integer.

        Raises ValueError when the layout has no room for its biases, stop ids or bad words.
        """
        row = self._packed(params, seed, prompt_length)
        if self.rows.is_cuda:
            row = row.pin_memory()
        self.rows[slot].copy_(row, non_blocking=True)

    def _packed(self, params: SamplingParams, seed: int, prompt_length: int) -> Tensor:
        layout = self.layout
        ends = sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)})
        longest = max(map(len, params.bad_words), default=0)
        for field, asked, most in (
            ("logit_bias", len(params.logit_bias), layout.bias),
            ("stop_token_ids", len(ends), layout.ends),
            ("bad_words", len(params.bad_words), layout.words),
            ("the longest of bad_words", longest, layout.word_length),
        ):
            if asked > most:
                raise ValueError(f"{field}: {asked} do not fit; at most {most} do")
        row = array("i", [-1]) * layout.width
        header = HEADER.pack(
            _int64(seed),
            max(params.temperature, COLDEST) if params.temperature > 0 else 0.0,
            params.top_p,
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.top_k,
            prompt_length,
            params.min_tokens,
            len(params.logit_bias),
            len(ends),
            len(params.bad_words),
        )
        _put(row, 0, array("i", header))
        _put(row, layout.bias_ids, array("i", [token for token, _ in params.logit_bias]))
        _put(row, layout.bias_values, array("i", array("f", [value for _, value in params.logit_bias]).tobytes()))
        _put(row, layout.end_ids, array("i", ends))
        for index, word in enumerate(params.bad_words):
            _put(row, layout.bad_words + (index + 1) * layout.word_length - len(word), array("i", word))
        return torch.frombuffer(row, dtype=torch.int32)


def _put(row: array[int], start: int, part: array[int]) -> None:
    row[start : start + len(part)] = part


def _int64(seed: int) -> int:
    """Any integer, folded into the range of a signed 64-bit one."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
