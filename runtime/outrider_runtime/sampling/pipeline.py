"""From logits to tokens, a whole batch of rows at once, target's and draft's alike.

The one rule: the token at position j is the one that maximises log p_j + G(seed, j), with p_j what is left after
penalties, temperature, top-k and top-p, and G the noise; greedy is without noise. No row depends on another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_runtime.sampling.noise import gumbel
from outrider_runtime.sampling.params import SamplingParams

LOGITS_AT_ONCE = 1 << 23  # elements; each takes several temporaries of up to 8 bytes
COLDEST = 1e-6  # temperature; below, quotients leave float32's range and the text is greedy's anyway


@dataclass(frozen=True, slots=True)
class Row:
    """One token to be drawn: behind `tokens`, whose first `prompt_length` are the prompt, and `drafted` ones."""

    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    prompt_length: int
    drafted: Sequence[int] = ()

    @property
    def position(self) -> int:
        return len(self.tokens) + len(self.drafted)

    @property
    def generated(self) -> list[int]:
        return [*self.tokens[self.prompt_length :], *self.drafted]

    def banned(self, eos_token_ids: Collection[int]) -> set[int]:
        """The tokens that would end the request before min_tokens."""
        if self.position - self.prompt_length >= self.params.min_tokens:
            return set()
        return set(self.params.stop_token_ids) | (set() if self.params.ignore_eos else set(eos_token_ids))


def sample(logits: Tensor, rows: Sequence[Row], eos_token_ids: Collection[int] = ()) -> Tensor:
    """[rows, vocab] logits to [rows] token ids, int64, on the logits' device. The logits are left as they were."""
    at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    starts = range(0, len(rows), at_once)
    parts = [_sample(logits[i : i + at_once], rows[i : i + at_once], eos_token_ids) for i in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sample(logits: Tensor, rows: Sequence[Row], eos_token_ids: Collection[int]) -> Tensor:
    logits = _without(_penalised(logits.to(torch.float32), rows), rows, eos_token_ids)
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if len(drawn) == len(rows):
        return _drawn(logits, rows)
    tokens = logits.argmax(-1)
    if drawn:
        members = _indices(drawn, logits)
        tokens[members] = _drawn(logits[members], [rows[index] for index in drawn])
    return tokens


def _drawn(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    temperatures = _column([max(row.params.temperature, COLDEST) for row in rows], logits)
    logits = _truncated(logits / temperatures, rows)
    seeds = torch.tensor([_int64(row.seed) for row in rows], device=logits.device)
    positions = torch.tensor([row.position for row in rows], device=logits.device)
    return (logits + gumbel(seeds, positions, logits.shape[-1])).argmax(-1)


def _penalised(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Repetition penalty over prompt and generated tokens, then frequency and presence over generated ones."""
    members = [
        index
        for index, row in enumerate(rows)
        if row.params.repetition_penalty != 1 or row.params.frequency_penalty or row.params.presence_penalty
    ]
    if not members:
        return logits
    chosen = [rows[index] for index in members]
    counts = _counts([row.generated for row in chosen], logits)
    seen = (counts > 0) | (_counts([row.tokens[: row.prompt_length] for row in chosen], logits) > 0)
    part = logits[_indices(members, logits)]
    repetition = _column([row.params.repetition_penalty for row in chosen], logits)
    part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
    part -= _column([row.params.frequency_penalty for row in chosen], logits) * counts
    part -= _column([row.params.presence_penalty for row in chosen], logits) * (counts > 0)
    return logits.index_copy(0, _indices(members, logits), part)


def _without(logits: Tensor, rows: Sequence[Row], eos_token_ids: Collection[int]) -> Tensor:
    known = range(logits.shape[-1])  # a draft may know fewer ids than its target
    banned = [(index, token) for index, row in enumerate(rows) for token in row.banned(eos_token_ids) if token in known]
    if not banned:
        return logits
    where = torch.tensor(banned, device=logits.device).unbind(1)
    return logits.index_put(where, torch.tensor(-torch.inf, device=logits.device))


def _truncated(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Tokens outside top-k, then outside top-p of what is left, get -inf; the likeliest always stays."""
    vocab_size = logits.shape[-1]
    members = [index for index, row in enumerate(rows) if 0 < row.params.top_k < vocab_size or row.params.top_p < 1]
    if not members:
        return logits
    chosen = [rows[index] for index in members]
    part = logits[_indices(members, logits)]
    kept = [row.params.top_k if row.params.top_k > 0 else vocab_size for row in chosen]
    width = min(max(kept), vocab_size)
    ordered, ids = part.topk(width) if width < vocab_size else part.sort(descending=True, stable=True)
    ranks = torch.arange(width, device=logits.device)
    ordered = ordered.masked_fill(ranks >= _column(kept, logits), -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # the mass of all likelier tokens
    outside = (before >= _column([row.params.top_p for row in chosen], logits)) & (ranks > 0)
    ordered = ordered.masked_fill(outside, -torch.inf)
    part = torch.full_like(part, -torch.inf).scatter(-1, ids, ordered)
    return logits.index_copy(0, _indices(members, logits), part)


def _counts(texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """How often each token id occurs in each text, [rows, vocab]. Ids that a draft does not know are passed over."""
    known = logits.shape[-1]
    texts = [[token for token in text if token < known] for text in texts]
    counts = torch.zeros(len(texts), known, device=logits.device)
    tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64, device=logits.device)
    owners = torch.arange(len(texts), device=logits.device).repeat_interleave(_indices(list(map(len, texts)), logits))
    return counts.index_put_((owners, tokens), torch.ones((), device=logits.device), accumulate=True)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)


def _indices(members: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(members, dtype=torch.int64, device=like.device)


def _int64(seed: int) -> int:
    """Any integer, folded into the range of a signed 64-bit one."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
