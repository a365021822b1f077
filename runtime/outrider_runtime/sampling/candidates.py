"""Which tokens a draft takes to be the target's next: several of them, for the branches of a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider_runtime.sampling.noise import gumbel
from outrider_runtime.sampling.table import Mode, SamplingTable, Settings

AT_ONCE = 1 << 25  # logits that are worked on in float32


def candidates(
    logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable, mode: Mode, count: int
) -> tuple[Tensor, Tensor]:
    """From a draft's [rows, vocab] logits, `count` tokens each, [rows, count] int32, likeliest first, and the
    logarithms of how likely the target draws them, float32. `slots`, `positions` and `mode` are sampler.sample()'s.

    The target draws argmax(log p + G) with the noise G known. If the draft's log q errs by Gumbel noise of its own,
    that is x with probability softmax(log q + G)[x]; greedy requests have no G. Penalties and truncation are left to
    the target: a candidate that they rule out is one in vain.
    """
    at_once = max(1, AT_ONCE // logits.shape[-1])
    parts = [
        _candidates(logits[part], slots[part], positions[part], table, mode, count)
        for part in (slice(start, start + at_once) for start in range(0, len(logits), at_once))
    ]
    tokens, confidences = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(confidences)


def _candidates(
    logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable, mode: Mode, count: int
) -> tuple[Tensor, Tensor]:
    scores = logits.to(torch.float32)
    if mode is not Mode.GREEDY:
        scores = _with_noise(scores, slots, positions, table)
    best, tokens = scores.topk(count)
    return tokens.to(torch.int32), best - scores.logsumexp(-1, keepdim=True)


def _with_noise(logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable) -> Tensor:
    if logits.is_cuda:
        from outrider_runtime.kernels import tree  # Triton is there with CUDA only

        return tree.with_noise(logits, slots, positions, table)
    settings = Settings(table.rows[slots])
    drawn = (settings.temperature > 0).unsqueeze(1)
    heated = logits / torch.where(drawn, settings.temperature.unsqueeze(1), 1)
    return torch.where(drawn, heated + gumbel(settings.seeds, positions.long(), logits.shape[-1]), logits)
