"""The shape of Medusa heads (Cai et al., arXiv 2401.10774), from their tensors: a config.json may say any number."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider_runtime.errors import Refusal
from outrider_runtime.models.config import ModelConfig, tensor_shapes
from outrider_runtime.models.weights import Shapes, derivable

INSIDE = "medusa_head."  # so begin the names of heads in the checkpoint of a whole model, as Medusa-2 trains both


@dataclass(frozen=True, slots=True)
class MedusaShape:
    heads: int
    blocks: int  # residual ones, of each head
    prefix: str = ""  # of the tensors' names
    tapped: tuple[int, ...] = ()  # the target's layers whose inputs it reads: none
    inside: bool = False  # of a whole model's checkpoint

    def __str__(self) -> str:
        inside = ", inside a whole model" if self.inside else ""
        return f"{self.heads} Medusa heads of {self.blocks} residual blocks{inside}"

    def tensor_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor, by its name in the checkpoint."""
        hidden = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.heads):
            for block in range(self.blocks):
                shapes[f"{self.prefix}{head}.{block}.linear.weight"] = (hidden, hidden)
                shapes[f"{self.prefix}{head}.{block}.linear.bias"] = (hidden,)
            shapes[f"{self.prefix}{head}.{self.blocks}.weight"] = (config.vocab_size, hidden)
        return shapes


def medusa_config(name: str, tensors: Shapes, target: ModelConfig) -> ModelConfig:
    """Of the heads called `name`, for this target. Raises Refusal."""
    matrices = [tensor for tensor, shape in tensors.items() if len(shape) == 2]
    found = [match for tensor in matrices if (match := re.fullmatch(r"(.*?)(\d+)\.(\d+)\.weight", tensor))]
    if not found:
        raise Refusal("UnsupportedModel", f"{name}: no 0.1.weight: these are no Medusa heads; give another draft")
    prefix, blocks = found[0][1], int(found[0][3])
    rows, hidden = tensors[found[0][0]]
    if hidden != target.hidden_size:
        raise Refusal(
            "UnsupportedModel",
            f"{name}: {found[0][0]} is {[rows, hidden]}, and the target's hidden size is {target.hidden_size}, not "
            f"{hidden}; give the heads that were trained for this target",
        )
    around = {
        tensor: shape for tensor, shape in tensors.items() if not tensor.startswith(prefix) and not derivable(tensor)
    }
    if around and (difference := _difference(around, target)):
        raise Refusal(
            "UnsupportedModel",
            f"{name}: a whole model with {len(found)} Medusa heads inside, and another than the target: {difference}; "
            f"the heads draft for that model alone, give {name} as the target, too",
        )
    return ModelConfig(
        architecture="Medusa heads",
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_layers=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_position_embeddings=target.max_position_embeddings,
        dtype=target.dtype,
        head=MedusaShape(heads=len(found), blocks=blocks, prefix=prefix, inside=bool(around)),
    )


def _difference(around: Shapes, target: ModelConfig) -> str:
    """In words, where the model around heads is of another shape than the target; empty when it is not."""
    asked = {tensor: shape for tensor, shape in tensor_shapes(target).items() if not derivable(tensor)}
    for tensor in sorted(around.keys() | asked.keys()):
        if around.get(tensor) != asked.get(tensor):
            there, here = (list(shapes[tensor]) if tensor in shapes else "none" for shapes in (around, asked))
            return f"{tensor} is {there} in it and {here} in the target"
    return ""
