"""From logits to tokens as sampling/pipeline.py draws them, without a look from the host, so that graphs can hold it.

The winner is searched twice: once over everything with the noise in float32, which says in which parts it can be; then
in those few parts with the noise in double precision, as the pipeline has it. So the tokens are the pipeline's, on any
device, at a float32's price.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_runtime.sampling.table import Mode, SamplingTable

# Of the vocabulary, a program each. Without noise others do as well: up to 16,384 by 2 to 16 warps, 20 to 21 us for 256
# rows of 128,256 on an H200. With noise a larger one has more to be searched again.
PART = 2048
EXACT_WARPS = 16  # of the search in double precision: with four it takes 9 us of the 12 that a single row takes
AT_ONCE = 1 << 24  # logits that are worked on in full: 8 bytes of scratch each, and a row for each multiprocessor
TEXT_PROGRAMS = 8  # that share the counting of one text

# The header's words, table.HEADER
_TEMPERATURE, _TOP_P, _LOG_MIN_P = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
_REPETITION, _PRESENCE, _FREQUENCY = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
_TOP_K, _PROMPT_LENGTH, _MIN_TOKENS = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
_NUM_BIAS, _NUM_ENDS, _NUM_WORDS = tl.constexpr(11), tl.constexpr(12), tl.constexpr(13)

# A token's mark: how often it was generated, and two bits
_COUNT = tl.constexpr((1 << 30) - 1)
_IN_PROMPT = tl.constexpr(1 << 30)
_BANNED = tl.constexpr(-(1 << 31))

_GOLDEN = tl.constexpr(0x9E3779B9)
_NOTHING = tl.constexpr(1 << 30)  # beyond every token id and part


def draw(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: SamplingTable,
    mode: Mode,
    *,
    place: bool = False,
    token_ids: Tensor | None = None,
) -> Tensor:
    """sampling/sampler.py's sample(), or draft() if what is drawn is to be placed, on CUDA. The vocabulary must be the
    last dimension, and dense."""
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    if mode is not Mode.FULL:
        noise = mode is Mode.NOISE
        _search(logits, slots, positions, table, tokens, noise=noise, place=place, token_ids=token_ids)
        return tokens
    at_once = max(1, AT_ONCE // logits.shape[-1] // 32 * 32)  # a chunk begins where the kernels see it aligned
    for start in range(0, len(logits), at_once):
        chunk = slice(start, start + at_once)
        scores, floors = _processed(logits[chunk], slots[chunk], positions[chunk], table)
        own = slots[chunk], positions[chunk], table, tokens[chunk]
        _search(scores, *own, noise=True, place=place, token_ids=token_ids, floors=floors)
    return tokens


def _processed(logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable) -> tuple[Tensor, Tensor]:
    """[rows, vocab] float32: biased, penalised, without what is banned, over the temperature; and the [rows] values
    below which nothing is drawn."""
    rows, vocab = logits.shape
    layout = table.layout
    scores = logits.to(torch.float32, copy=True)
    marks = torch.zeros(rows, vocab, dtype=torch.int32, device=logits.device)
    floors = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _mark[(rows, TEXT_PROGRAMS)](
        scores,
        marks,
        slots,
        positions,
        table.rows,
        table.rows.view(torch.float32),
        table.tokens,
        table.tokens.stride(0),
        VOCAB=vocab,
        WIDTH=layout.width,
        BIAS_IDS=layout.bias_ids,
        BIAS_VALUES=layout.bias_values,
        END_IDS=layout.end_ids,
        BAD_WORDS=layout.bad_words,
        WORD_LENGTH=layout.word_length,
        WORD_BLOCK=triton.next_power_of_2(layout.word_length),
        PROGRAMS=TEXT_PROGRAMS,
        BLOCK=1024,
    )
    _adjust[(triton.cdiv(vocab, PART), rows)](
        scores,
        marks,
        slots,
        table.rows.view(torch.float32),
        VOCAB=vocab,
        WIDTH=layout.width,
        PART=PART,
        enable_fp_fusion=False,  # each product and sum rounds for itself, as in torch
    )
    _floor[(rows,)](
        scores,
        floors,
        slots,
        table.rows,
        table.rows.view(torch.float32),
        VOCAB=vocab,
        WIDTH=layout.width,
        BLOCK=min(8192, triton.next_power_of_2(vocab)),
        num_warps=16,
    )
    return scores, floors


def _search(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: SamplingTable,
    tokens: Tensor,
    *,
    noise: bool,
    place: bool,
    token_ids: Tensor | None,
    floors: Tensor | None = None,
) -> None:
    """With floors, the logits are over the temperature already."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, PART)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    arguments = (
        logits,
        logits.stride(0),
        slots,
        positions,
        table.rows,
        table.rows.view(torch.float32),
        logits if floors is None else floors,
        token_ids,
        best,
    )
    constants = {
        "VOCAB": vocab,
        "WIDTH": table.layout.width,
        "PARTS": parts,
        "PART": PART,
        "NOISE": noise,
        "FLOORS": floors is not None,
    }
    _best_of_parts[(parts, rows)](*arguments, **constants)
    _best[(rows,)](
        *arguments,
        tokens,
        table.tokens,
        table.tokens.stride(0),
        table.tokens.shape[1] - 1,
        PLACE=place,
        PART_BLOCK=triton.next_power_of_2(parts),
        **constants,
        num_warps=EXACT_WARPS if noise else 4,
    )


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _best_of_parts(
    logits: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    table_floats: tl.tensor,
    floors: tl.tensor,
    token_ids: tl.tensor,
    best: tl.tensor,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    NOISE: tl.constexpr,
    FLOORS: tl.constexpr,
) -> None:
    part, row = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    score = _load_part(logits, stride, floors, row, token, VOCAB, FLOORS)
    if NOISE:
        slot = tl.load(slots + row)
        temperature = tl.load(table_floats + slot * WIDTH + _TEMPERATURE)
        if temperature > 0:
            named = _named(token_ids, token, VOCAB)
            word = _words(table + slot * WIDTH, tl.load(positions + row), named)
            if not FLOORS:
                score = score / temperature
            score += _nearly_gumbel(word)
    tl.store(best + row * PARTS + part, tl.max(score))


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _best(
    logits: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    table_floats: tl.tensor,
    floors: tl.tensor,
    token_ids: tl.tensor,
    best: tl.tensor,
    tokens: tl.tensor,
    texts: tl.tensor,
    text_stride: tl.tensor,
    last_column: tl.tensor,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    NOISE: tl.constexpr,
    FLOORS: tl.constexpr,
    PLACE: tl.constexpr,
    PART_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    part = tl.arange(0, PART_BLOCK)
    inside = part < PARTS
    nearly = tl.load(best + row * PARTS + part, mask=inside, other=-float("inf"))
    largest = tl.max(nearly)
    slot = tl.load(slots + row)
    temperature = tl.load(table_floats + slot * WIDTH + _TEMPERATURE)
    margin = 0.0
    most = 1  # without noise the scores were exact, so the first part has it
    if NOISE:  # noqa: SIM102  (decided when compiling, the inner one on the device)
        if temperature > 0:
            # Twice what the nearly exact scores may be off: by 1e-5 in the noise, by two units in the last place in
            # the quotient and the sum.
            margin = 0.0001220703125 + tl.abs(largest) * 0.0000019073486328125
            most = PARTS
    near = inside & (nearly >= largest - margin)
    count = tl.minimum(tl.sum(near.to(tl.int32)), most)
    part_found = -1
    best_score = -float("inf")
    best_token = 0
    for _ in range(count):
        part_found = tl.min(tl.where(near & (part > part_found), part, _NOTHING))
        token = part_found * PART + tl.arange(0, PART)
        score = _load_part(logits, stride, floors, row, token, VOCAB, FLOORS)
        if NOISE:  # noqa: SIM102
            if temperature > 0:
                named = _named(token_ids, token, VOCAB)
                word = _words(table + slot * WIDTH, tl.load(positions + row), named)
                if not FLOORS:
                    score = tl.div_rn(score, temperature)
                score += _gumbel(word)
        top = tl.max(score)
        if top > best_score:
            best_score = top
            best_token = tl.min(tl.where(score == top, token, _NOTHING))
    best_token = _named(token_ids, best_token, VOCAB)
    tl.store(tokens + row, best_token)
    if PLACE:
        column = tl.minimum(tl.load(positions + row), last_column)
        tl.store(texts + slot.to(tl.int64) * text_stride + column, best_token)


@triton.jit
def _load_part(
    logits: tl.tensor,
    stride: tl.tensor,
    floors: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    VOCAB: tl.constexpr,
    FLOORS: tl.constexpr,
) -> tl.tensor:
    at = logits + row.to(tl.int64) * stride + token
    score = tl.load(at, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
    if FLOORS:
        score = tl.where(score < tl.load(floors + row), -float("inf"), score)
    return score


@triton.jit
def _named(token_ids: tl.tensor, column: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    """The tokens that columns of the logits are of."""
    token = column
    if token_ids is not None:
        token = tl.load(token_ids + column, mask=column < VOCAB, other=0).to(tl.int32)
    return token


@triton.jit
def _words(settings: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """sampling/noise.py's random_words, in 32-bit arithmetic."""
    low = tl.load(settings).to(tl.uint32, bitcast=True)
    high = tl.load(settings + 1).to(tl.uint32, bitcast=True)
    row = _mix(_mix(_mix(low ^ _GOLDEN) ^ high) ^ position.to(tl.uint32))
    other = _mix(_mix(row ^ _GOLDEN))
    return _mix(_mix(token.to(tl.uint32) * _GOLDEN + row) ^ other)


@triton.jit
def _mix(word: tl.tensor) -> tl.tensor:
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def _gumbel(word: tl.tensor) -> tl.tensor:
    """sampling/noise.py's gumbel: 1 - v is exact in double precision, so its logarithm is log1p's."""
    complement = ((word ^ 0xFFFFFFFF).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(complement))).to(tl.float32)


@triton.jit
def _nearly_gumbel(word: tl.tensor) -> tl.tensor:
    """Within 1e-5 of it. The logarithm's series where 1 - v has lost v's last places: there the winners lie."""
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    complement = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1 + v * (0.5 + v * (0.3333333333333333 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(complement)))


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _mark(
    scores: tl.tensor,
    marks: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    table_floats: tl.tensor,
    texts: tl.tensor,
    text_stride: tl.tensor,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS_IDS: tl.constexpr,
    BIAS_VALUES: tl.constexpr,
    END_IDS: tl.constexpr,
    BAD_WORDS: tl.constexpr,
    WORD_LENGTH: tl.constexpr,
    WORD_BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add the biases; mark what stands in the text, and what is banned."""
    row, program = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)
    settings = table + slot * WIDTH
    floats = table_floats + slot * WIDTH
    text = texts + slot.to(tl.int64) * text_stride
    scores += row.to(tl.int64) * VOCAB
    marks += row.to(tl.int64) * VOCAB
    prompt_length = tl.load(settings + _PROMPT_LENGTH)
    index = tl.arange(0, BLOCK)

    if (tl.load(floats + _REPETITION) != 1) | (tl.load(floats + _PRESENCE) != 0) | (tl.load(floats + _FREQUENCY) != 0):
        for start in range(program * BLOCK, position, PROGRAMS * BLOCK):
            at = start + index
            token = tl.load(text + at, mask=at < position, other=VOCAB)
            known = token < VOCAB  # a draft may know fewer ids than its target
            tl.atomic_add(marks + token, 1, mask=known & (at >= prompt_length), sem="relaxed")
            tl.atomic_or(marks + token, _IN_PROMPT, mask=known & (at < prompt_length), sem="relaxed")

    if program == 0:
        count = tl.load(settings + _NUM_BIAS)
        for start in range(0, count, BLOCK):
            given = start + index < count
            token = tl.load(settings + BIAS_IDS + start + index, mask=given, other=VOCAB)
            value = tl.load(floats + BIAS_VALUES + start + index, mask=given, other=0.0)
            known = token < VOCAB
            score = tl.load(scores + token, mask=known, other=0.0)
            tl.store(scores + token, score + value, mask=known)

        if position - prompt_length < tl.load(settings + _MIN_TOKENS):
            count = tl.load(settings + _NUM_ENDS)
            for start in range(0, count, BLOCK):
                token = tl.load(settings + END_IDS + start + index, mask=start + index < count, other=VOCAB)
                tl.atomic_or(marks + token, _BANNED, mask=token < VOCAB, sem="relaxed")

        count = tl.load(settings + _NUM_WORDS)
        WORDS: tl.constexpr = 32
        if count > 0:
            place = tl.arange(0, WORD_BLOCK)
            at = position + 1 - WORD_LENGTH + place
            told = (place < WORD_LENGTH - 1) & (at >= prompt_length)
            tail = tl.load(text + at, mask=told, other=-2)
            for start in range(0, count, WORDS):
                word = start + tl.arange(0, WORDS)
                stored = (word < count)[:, None] & (place < WORD_LENGTH)[None, :]
                tokens = tl.load(
                    settings + BAD_WORDS + word[:, None] * WORD_LENGTH + place[None, :], mask=stored, other=-1
                )
                differs = (tokens != tail[None, :]) & (tokens >= 0) & (place < WORD_LENGTH - 1)[None, :]
                last = tl.max(tl.where((place == WORD_LENGTH - 1)[None, :], tokens, -1), axis=1)
                completed = tl.max(differs.to(tl.int32), axis=1) == 0
                tl.atomic_or(marks + last, _BANNED, mask=completed & (last >= 0) & (last < VOCAB), sem="relaxed")


@triton.jit
def _adjust(
    scores: tl.tensor,
    marks: tl.tensor,
    slots: tl.tensor,
    table_floats: tl.tensor,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Penalties, bans and temperature, in place."""
    part, row = tl.program_id(0), tl.program_id(1)
    settings = table_floats + tl.load(slots + row) * WIDTH
    token = part * PART + tl.arange(0, PART)
    inside = token < VOCAB
    at = row.to(tl.int64) * VOCAB + token
    score = tl.load(scores + at, mask=inside, other=0.0)
    mark = tl.load(marks + at, mask=inside, other=0)
    count = (mark & _COUNT).to(tl.float32)
    seen = (mark & (_COUNT | _IN_PROMPT)) != 0
    repetition = tl.load(settings + _REPETITION)
    score = tl.where(seen, tl.where(score > 0, tl.div_rn(score, repetition), score * repetition), score)
    score = score - tl.load(settings + _FREQUENCY) * count
    score = score - tl.load(settings + _PRESENCE) * tl.where(count > 0, 1.0, 0.0)
    score = tl.where(mark < 0, -float("inf"), score)
    temperature = tl.load(settings + _TEMPERATURE)
    score = tl.div_rn(score, tl.where(temperature > 0, temperature, 1.0))
    tl.store(scores + at, score, mask=inside)


@triton.jit
def _floor(
    scores: tl.tensor,
    floors: tl.tensor,
    slots: tl.tensor,
    table: tl.tensor,
    table_floats: tl.tensor,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The lowest score that top-k, then top-p, then min-p leave."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    scores += row.to(tl.int64) * VOCAB
    top_k = tl.load(table + slot * WIDTH + _TOP_K)
    top_p = tl.load(table_floats + slot * WIDTH + _TOP_P)
    log_min_p = tl.load(table_floats + slot * WIDTH + _LOG_MIN_P)
    drawn = tl.load(table_floats + slot * WIDTH + _TEMPERATURE) > 0
    floor = -float("inf")
    if drawn & ((top_k > 0) | (top_p < 1) | (log_min_p > -float("inf"))):
        highest = tl.full((BLOCK,), -float("inf"), tl.float32)
        lowest = tl.full((BLOCK,), float("inf"), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            score = _load_scores(scores, start, VOCAB, BLOCK)
            highest = tl.maximum(highest, score)
            lowest = tl.minimum(lowest, tl.where(score > -float("inf"), score, float("inf")))
        largest = tl.max(highest)
        floor = tl.min(lowest)  # of what is not banned
        if (top_k > 0) & (top_k < VOCAB):
            floor = _lowest_kept(scores, floor, largest, top_k.to(tl.float32), largest, False, VOCAB, BLOCK)
        if top_p < 1:
            masses = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, VOCAB, BLOCK):
                score = _load_scores(scores, start, VOCAB, BLOCK)
                masses += tl.where(score >= floor, tl.exp(score - largest), 0.0)
            floor = _lowest_kept(scores, floor, largest, top_p * tl.sum(masses), largest, True, VOCAB, BLOCK)
        floor = tl.maximum(floor, largest + log_min_p)
    tl.store(floors + row, floor)


@triton.jit
def _lowest_kept(
    scores: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    limit: tl.tensor,
    largest: tl.tensor,
    MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The lowest of the scores from `low` to `high` such that there is less than `limit` above it: tokens, or their
    mass. By bisection, whose ends are moved on to the next score each time; `high` is taken if no other is."""
    while low < high:
        pivot = low + (high - low) * 0.5
        pivot = tl.where(pivot < high, pivot, low)  # it may have been rounded up
        measures = tl.zeros((BLOCK,), tl.float32)
        above = tl.full((BLOCK,), float("inf"), tl.float32)
        below = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            score = _load_scores(scores, start, VOCAB, BLOCK)
            is_above = score > pivot
            above = tl.minimum(above, tl.where(is_above, score, float("inf")))
            below = tl.maximum(below, tl.where(is_above, -float("inf"), score))
            if MASS:
                measures += tl.where(is_above, tl.exp(score - largest), 0.0)
            else:
                measures += tl.where(is_above, 1.0, 0.0)
        if tl.sum(measures) < limit:
            high = tl.max(below)
        else:
            low = tl.min(above)
    return high


@triton.jit
def _load_scores(scores: tl.tensor, start: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    token = start + tl.arange(0, BLOCK)
    return tl.load(scores + token, mask=token < VOCAB, other=-float("inf"))
