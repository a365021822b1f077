"""Synthetic targets, and drafts and prompts that agree with them exactly as often as one asks.

Greedily, a target says its whole vocabulary in one circle, whose order is drawn by lot. Its layers are as many and as
large as the shape says, and attend to all there is, but what they add is too small to change what comes next.
A draft says the same circle, but for a share of tokens, drawn by lot, behind which it says another one. A prompt for
n-gram holds what the target is going to say, but for a share of tokens. So each drafted token stands with the same
chance, truly verified, and no text repeats itself otherwise.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider_runtime.models.config import model_config
from outrider_runtime.models.llama import LlamaForCausalLM

ADDED = 0.04  # what a layer's half adds, against an embedding of 1
BLOCK = 32  # neighbours in the circle, of which the share that is agreed on is as asked: less luck in short runs
MATCH = 2  # tokens, as many as n-gram needs to find a place

Shape = dict[str, object]


class Circle:
    """The order in which a target says its vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        lots = np.random.default_rng(0)
        blocks = [lots.permutation(BLOCK) for _ in range(-(-vocab_size // BLOCK))]
        self._order = lots.permutation(vocab_size)
        self._chances = (np.concatenate(blocks)[:vocab_size] + 0.5) / BLOCK  # by place in the order

    def walk(self, place: int, length: int) -> np.ndarray:
        """[length] token ids."""
        return np.take(self._order, range(place, place + length), mode="wrap")

    def copy(self, place: int, length: int, agreement: float) -> np.ndarray:
        """The same, where it is agreed on; else other tokens."""
        agreed = np.take(self._chances, range(place, place + length), mode="wrap") < agreement
        return np.where(agreed, self.walk(place, length), self.walk(place + len(self._order) // 2, length))

    def before(self, agreement: float) -> Tensor:
        """[vocab]: behind which token a model says this one, if it says what the target says where it is agreed on.
        More agreement is on more of the same tokens."""
        after = np.roll(self._order, -1)
        differ = np.flatnonzero(np.roll(self._chances, -1) >= agreement)
        said = after.copy()
        said[differ] = after[np.roll(differ, -1)]
        before = np.empty_like(self._order)
        before[said] = self._order
        return torch.from_numpy(before)


@torch.no_grad()
def build(shape: Shape, circle: Circle, dtype: torch.dtype, device: str, seed: int) -> LlamaForCausalLM:
    """Of this shape, in full agreement. The head has weights of its own, which are read as tied ones would be."""
    model = LlamaForCausalLM(model_config(shape | {"tie_word_embeddings": False}), dtype, device)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0 if "norm" in name else 0.0)
        elif name.startswith("layers"):
            adds = name.endswith(("attention.output.weight", "mlp.down.weight"))
            parameter.normal_(0.0, (ADDED if adds else 1.0) * parameter.shape[1] ** -0.5)
    model.embedding.weight.normal_()
    model.norm.weight.fill_(model.config.hidden_size**-0.5)
    agree(model, circle, 1.0)
    return model.eval()


@torch.no_grad()
def agree(model: LlamaForCausalLM, circle: Circle, agreement: float) -> None:
    """From now on, in this share of tokens. In place and in the stream's order: graphs and steps go on."""
    before = circle.before(agreement).to(model.device)
    model.head.weight.copy_(model.embedding.weight[before])


def prompt(circle: Circle, index: int, length: int) -> tuple[int, ...]:
    """The index-th, for drafts of models."""
    return tuple(circle.walk(_place(index), length).tolist())


def prompt_to_copy(circle: Circle, index: int, output: int, agreement: float) -> tuple[int, ...]:
    """The index-th, for n-gram: it holds the next `output` tokens, where they are agreed on."""
    place = _place(index)
    begin = circle.walk(place, MATCH)
    return tuple(np.concatenate([begin, circle.copy(place + MATCH, output, agreement), begin]).tolist())


def _place(index: int) -> int:
    return 7919 * index
