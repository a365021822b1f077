"""Log probabilities for the client: the model's own, at temperature 1, before bias, penalties and truncation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_runtime.sampling.pipeline import LOGITS_AT_ONCE


@dataclass(frozen=True, slots=True)
class Logprobs:
    """`chosen` [rows] of the drawn tokens; `top_ids` (int32) and `top` [rows, count] of the likeliest, best first."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> Logprobs:
    """Of [rows, vocab] logits and the [rows] tokens drawn from them, float32; `count` 0 is the drawn ones alone.

    The same as vLLM tells by default. Fixed shapes and no look from the host, so graphs can hold it.
    """
    at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    parts = [
        _logprobs(logits[start : start + at_once].to(torch.float32), tokens[start : start + at_once], count)
        for start in range(0, len(logits), at_once)
    ]
    chosen, top_ids, top = (torch.cat(part) for part in zip(*parts, strict=True))
    return Logprobs(chosen, top_ids, top)


def _logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    total = logits.logsumexp(-1, keepdim=True)
    top = logits.topk(count)
    chosen = logits.gather(1, tokens.long().unsqueeze(1)) - total
    return chosen.squeeze(1), top.indices.to(torch.int32), top.values - total
