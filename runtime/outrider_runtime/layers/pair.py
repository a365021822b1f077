"""What an EAGLE head begins with: a token's embedding beside the hidden state of the position before it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider_runtime.layers.norm import RMSNorm


def pair(embeddings: Tensor, token_ids: Tensor, states: Tensor, norms: tuple[RMSNorm, RMSNorm] | None) -> Tensor:
    """[vocab, size] embeddings, [tokens] ids and [tokens, size] states to [tokens, 2 * size], each half with its norm,
    if there are any. Ids behind the last embedding, which a narrower head does not know, are taken for the last."""
    if states.is_cuda:
        from outrider_runtime.kernels.pair import pair as kernel

        if norms is None:
            return kernel(embeddings, token_ids, states)
        return kernel(embeddings, token_ids, states, norms=(norms[0].weight, norms[1].weight), eps=norms[0].eps)
    embedded = F.embedding(token_ids.clamp(max=len(embeddings) - 1), embeddings)
    if norms is not None:
        embedded, states = norms[0](embedded), norms[1](states)
    return torch.cat((embedded, states), dim=1)
