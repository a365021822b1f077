"""What a request may ask of an engine. Values out of range would spoil a step for everybody in it, so none gets in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from outrider_runtime.errors import BadRequest
from outrider_runtime.sampling.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

MAX_TOKENS = 1 << 30  # of whatever is counted in tokens: it fits an int32


def check_prompt(prompt: Sequence[int], *, max_model_len: int, vocab_size: int) -> None:
    """Raises BadRequest. `max_model_len` is what prompt and answer may have together."""
    if not prompt:
        raise BadRequest("the prompt is empty; at least one token is needed", param="prompt")
    if len(prompt) >= max_model_len:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens; the context of {max_model_len} leaves no room for "
            "an answer; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise BadRequest(f"the prompt's token ids must be from 0 to {vocab_size - 1}", param="prompt")


def check_params(params: SamplingParams, *, vocab_size: int) -> None:
    """Raises BadRequest for the first field that is out of range."""
    if params.max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, not {params.max_tokens}", param="max_tokens")
    for field, value, low, high in _numbers(params):
        if not low <= value <= high:  # so is what is no number
            raise BadRequest(f"{field} must be from {low:g} to {high:g}, not {value:g}", param=field)
    if params.repetition_penalty <= 0:
        raise BadRequest(f"repetition_penalty must be above 0, not {params.repetition_penalty:g}", "repetition_penalty")
    for field, count, most, what in (
        ("logit_bias", len(params.logit_bias), MAX_LOGIT_BIAS, "token ids"),
        ("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS, "token ids"),
        ("bad_words", len(params.bad_words), MAX_BAD_WORDS, "sequences"),
        ("bad_words", max(map(len, params.bad_words), default=0), MAX_BAD_WORD_TOKENS, "tokens in each"),
    ):
        if count > most:
            raise BadRequest(f"{field} may have {most} {what}, not {count}", param=field)
    if isinstance(params.stop, str) or not all(params.stop):
        raise BadRequest(f"stop must be a tuple of strings, none empty, not {params.stop!r}", param="stop")
    if not all(params.bad_words):
        raise BadRequest("bad_words has a sequence without tokens; drop it", param="bad_words")
    biased = [token for token, _ in params.logit_bias]
    if len(set(biased)) < len(biased):
        raise BadRequest("logit_bias names a token id twice; give each once", param="logit_bias")
    for field, ids in (
        ("logit_bias", biased),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words", [token for word in params.bad_words for token in word]),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise BadRequest(f"{field}'s token ids must be from 0 to {vocab_size - 1}", param=field)


def _numbers(params: SamplingParams) -> Iterator[tuple[str, float, float, float]]:
    """Name, value, and the least and most it may be."""
    largest = 3e38  # a float32 on the device
    yield "temperature", params.temperature, 0, largest
    yield "top_k", params.top_k, 0, MAX_TOKENS * 2 - 1
    yield "top_p", params.top_p, 0, 1
    yield "min_p", params.min_p, 0, 1
    yield "presence_penalty", params.presence_penalty, -largest, largest
    yield "frequency_penalty", params.frequency_penalty, -largest, largest
    yield "repetition_penalty", params.repetition_penalty, 0, largest
    yield "min_tokens", params.min_tokens, 0, MAX_TOKENS
    yield "logprobs", params.logprobs or 0, 0, MAX_LOGPROBS
    yield "speculative", params.speculative or 0, 0, math.inf
    for _, bias in params.logit_bias:
        yield "logit_bias", bias, -largest, largest
