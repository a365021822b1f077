"""The distribution that all parameters of a request leave, from the definitions; and whether draws follow it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.pipeline import Row

VOCAB = 12
EOS = (2,)
PLAIN = SamplingParams(max_tokens=10)
GREEDY = replace(PLAIN, temperature=0.0)
CASES = {
    "softmax": PLAIN,
    "warm": replace(PLAIN, temperature=1.7),
    "cold": replace(PLAIN, temperature=0.4),
    "top-k": replace(PLAIN, top_k=4),
    "top-k of more than there are": replace(PLAIN, top_k=100),
    "top-p": replace(PLAIN, top_p=0.7),
    "top-p of next to nothing": replace(PLAIN, top_p=1e-9),
    "top-k, then top-p": replace(PLAIN, top_k=5, top_p=0.8, temperature=1.5),
    "min-p": replace(PLAIN, min_p=0.3),
    "top-p, then min-p": replace(PLAIN, top_p=0.95, min_p=0.2, temperature=2.0),
    "bias": replace(PLAIN, logit_bias=((0, 2.0), (5, -1.5), (11, -100.0)), repetition_penalty=1.3),
    "bad words": replace(PLAIN, bad_words=((9,), (1, 8, 3), (5, 8, 4), (8, 0), (7, 8, 5, 5, 1, 8, 2))),
    "penalties": replace(PLAIN, frequency_penalty=0.7, presence_penalty=-0.5, repetition_penalty=1.4),
    "penalties, then the rest": replace(PLAIN, frequency_penalty=0.9, top_k=6, top_p=0.9, temperature=0.8),
    "min_tokens": replace(PLAIN, min_tokens=9, stop_token_ids=(3, 4)),
    "min_tokens, EOS ignored": replace(PLAIN, min_tokens=9, stop_token_ids=(3, 4), ignore_eos=True),
    "min_tokens reached": replace(PLAIN, min_tokens=5, stop_token_ids=(3, 4)),
}
LOGITS = [1.5 * math.sin(5 * token + 1) for token in range(VOCAB)]
TEXT = [5, 6, 7, 8, 5, 5]
DRAFTED = [1, 8]


def expected_distribution(given: Sequence[float], row: Row) -> list[float]:
    """Of one row's logits, in plain Python."""
    logits, params = list(given), row.params
    generated = [*row.tokens[row.prompt_length :], *row.drafted]
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in {*row.tokens, *row.drafted}:
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(generated):
        logits[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    if len(generated) < params.min_tokens:
        for token in {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}:
            logits[token] = -math.inf
    for *begun, token in params.bad_words:
        if generated[len(generated) - len(begun) :] == begun:
            logits[token] = -math.inf
    weights = [math.exp(value / params.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if kept and (mass / total >= params.top_p or weights[token] < params.min_p * weights[order[0]]):
            break
        kept.append(token)
        mass += weights[token]
    return [weights[token] / mass if token in kept else 0.0 for token in range(len(logits))]


def follows(observed: Sequence[int], probabilities: Sequence[float]) -> bool:
    """Pearson's chi-squared test at p = 0.0001; what cannot come must not have come. Cells that should have less than
    five draws count together."""
    draws = sum(observed)
    cells: Mapping[bool, list[tuple[int, float]]] = {True: [], False: []}
    for seen, probability in zip(observed, probabilities, strict=True):
        if probability == 0 and seen:
            return False
        cells[draws * probability >= 5].append((seen, draws * probability))
    rare = tuple(map(sum, zip(*cells[False], strict=True))) or (0, 0.0)
    counted = [*cells[True], *([rare] if rare[1] >= 5 else [])]
    statistic = sum((seen - due) ** 2 / due for seen, due in counted)
    degrees = len(counted) - 1
    # Wilson and Hilferty's normal approximation of the quantile
    bound = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3 if degrees else 1e-9
    return statistic <= bound
