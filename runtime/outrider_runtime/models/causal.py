"""What the engine asks of any model: weights to fill; and of a causal language model, whoever wrote its layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from outrider_runtime.errors import Refusal
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.attention import AttentionShape
from outrider_runtime.layers.batch import Batch
from outrider_runtime.models.config import ModelConfig
from outrider_runtime.models.weights import derivable


class Weighted(nn.Module):
    """Weights are uninitialised until they are copied to shards()."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)

    @abstractmethod
    def shards(self) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint goes, by its name there."""

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors named as in a checkpoint, converting their dtype.

        Raises Refusal(UnsupportedModel) naming what is missing, unexpected or of another shape.
        """
        missing = self.shards()
        unexpected, misshaped = [], []
        for name, tensor in weights:
            shard = missing.pop(name, None)
            if shard is None:
                if not derivable(name):
                    unexpected.append(name)
            elif shard.shape != tensor.shape:
                misshaped.append(f"{name} is {list(tensor.shape)}, config.json says {list(shard.shape)}")
            else:
                shard.copy_(tensor)
        faults = [("missing", list(missing)), ("unexpected", unexpected), ("misshaped", misshaped)]
        if any(names for _, names in faults):
            told = "; ".join(f"{fault}: {_some(names)}" for fault, names in faults if names)
            raise Refusal("UnsupportedModel", f"the checkpoint's tensors do not fit {self.config.architecture}: {told}")

    def check(self, target: ModelConfig) -> None:
        """Of a draft whose weights are read: whether it can draft for this target. Raises Refusal."""


class CausalLM(Weighted):
    """`taps` [tokens, layers * hidden], once tap() was called, is what enters the tapped layers, by a step's tokens."""

    attention_shape: AttentionShape
    taps: Tensor | None = None

    @property
    def output(self) -> Tensor | None:
        """[vocab, hidden], the matrix that logits() multiplies by, where it does nothing else."""
        return None

    @abstractmethod
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Write the batch's KV and return its hidden states after the last norm, [tokens, hidden]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""

    def tap(self, layers: Sequence[int], tokens: int) -> None:
        """From now on forward() leaves in `taps` what enters these layers, of the first `tokens` of a step. What would
        enter one more layer than there are is what leaves the last. Raises Refusal(UnsupportedModel)."""
        raise Refusal(
            "UnsupportedModel",
            f"{self.config.architecture} runs by transformers' code, which does not give out what enters its layers; "
            "use the method draft-model, ngram or medusa",
        )

    def embeddings(self) -> Tensor:
        """[vocab, hidden], for drafts that share them. Raises Refusal(UnsupportedModel)."""
        raise Refusal(
            "UnsupportedModel",
            f"{self.config.architecture} runs by transformers' code, whose embedding no draft shares; "
            "use the method draft-model, ngram or medusa",
        )


def _some(names: list[str], shown: int = 5) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
