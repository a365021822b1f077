"""What the engine asks of a causal language model, whoever wrote its layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from outrider_runtime.errors import Refusal
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.attention import AttentionShape
from outrider_runtime.layers.batch import Batch
from outrider_runtime.models.config import ModelConfig
from outrider_runtime.models.weights import derivable


class CausalLM(nn.Module):
    """Weights are uninitialised until they are copied to shards()."""

    attention_shape: AttentionShape

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)

    @abstractmethod
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Write the batch's KV and return its hidden states after the last norm, [tokens, hidden]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""

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


def _some(names: list[str], shown: int = 5) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
