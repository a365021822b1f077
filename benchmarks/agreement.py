"""Synthetic targets, and drafts and prompts that agree with them exactly as often as one asks.

Greedily, a target says the first tokens of its vocabulary in one circle, whose order is drawn by lot. Its layers are as
many and as large as the shape says, and attend to all there is, but what they add is too small to change what comes
next. A draft, model or head, says the same circle, but for a share of tokens, drawn by lot, behind which it says
another one. A prompt for n-gram holds what the target is going to say, but for a share of tokens. So each drafted token
stands with the same chance, truly verified, and no text repeats itself otherwise.

An EAGLE-1 head passes its token's embedding on, a row of a table of its own. Medusa's heads know the circle one, two
and more tokens on. An EAGLE-3 head is told its token by its attention alone: queries are as keys, so that each position
attends to itself, and its output layer knows what becomes of each embedding on the way.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from benchmarks.decode import head_config
from torch import Tensor
from torch.nn import functional as F

from outrider_runtime.models.causal import Weighted
from outrider_runtime.models.config import model_config
from outrider_runtime.models.eagle import EagleHead
from outrider_runtime.models.eagle_config import EagleShape
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.models.medusa import MedusaHeads
from outrider_runtime.models.registry import make_draft

ADDED = 0.04  # what a layer's half adds, against an embedding of 1
BLOCK = 32  # neighbours in the circle, of which the share that is agreed on is as asked: less luck in short runs
FAINT = 0.05  # an EAGLE-3 head's state, against what its attention adds
SELF = 40.0  # the score of a position that attends to itself; those of others are a few times less
MATCH = 2  # tokens, as many as n-gram needs to find a place

Shape = dict[str, object]


class Circle:
    """The order in which a target says the first `size` tokens of its vocabulary."""

    def __init__(self, size: int) -> None:
        self.size = size
        lots = np.random.default_rng(0)
        blocks = [lots.permutation(BLOCK) for _ in range(-(-size // BLOCK))]
        self._order = lots.permutation(size)
        self._chances = (np.concatenate(blocks)[:size] + 0.5) / BLOCK  # by place in the order

    def walk(self, place: int, length: int) -> np.ndarray:
        """[length] token ids."""
        return np.take(self._order, range(place, place + length), mode="wrap")

    def copy(self, place: int, length: int, agreement: float) -> np.ndarray:
        """The same, where it is agreed on; else other tokens."""
        agreed = np.take(self._chances, range(place, place + length), mode="wrap") < agreement
        return np.where(agreed, self.walk(place, length), self.walk(place + len(self._order) // 2, length))

    def before(self, agreement: float) -> Tensor:
        """[size]: behind which token a model says this one, if it says what the target says where it is agreed on.
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
    """A target or a draft model of this shape, in full agreement. Its output layer has weights of its own, which are
    read as tied ones would be."""
    model = LlamaForCausalLM(model_config(shape | {"tie_word_embeddings": False}), dtype, device)
    _at_random(model, seed)
    model.embedding.weight.normal_()
    model.norm.weight.fill_(model.config.hidden_size**-0.5)
    model.head.weight.zero_()
    agree(model, model, circle, 1.0)
    return model.eval()


@torch.no_grad()
def build_head(method: str, target: LlamaForCausalLM, circle: Circle) -> Weighted:
    """In full agreement with this target. What its attention and its blocks add is small, but for EAGLE-3."""
    config = head_config(method, target.config)
    if isinstance(config.head, EagleShape):
        third = config.head.version == 3
        shape = replace(config.head, mapped=False, norm_before_residual=third, own_embedding=not third)
        config = replace(config, head=shape)
    head = make_draft(config, target.dtype, target.device)
    _at_random(head, seed=1)
    size = config.hidden_size
    if isinstance(head, MedusaHeads):
        head.first.weight.mul_(ADDED)
        for output in head.outputs:
            output.weight.zero_()
    elif isinstance(head, EagleHead) and head.embedding is not None:
        head.embedding.weight.copy_(target.embedding.weight)
        head.fc.weight[:, :size].copy_(torch.eye(size))
        head.fc.weight[:, size:].mul_(ADDED)
    elif isinstance(head, EagleHead):
        attention, (_, state_norm) = head.first.attention, head.first.norms
        state_norm.weight.fill_(FAINT)
        head.norm.weight.fill_(size**-0.5)
        queries, keys, _ = attention.qkv.weight.split(list(attention.qkv.outputs.values()))
        keys.mul_((SELF * config.head_dim**-0.5) ** 0.5)
        queries.copy_(_for_each_head(keys.T, head).T)
        attention.output.weight.div_(ADDED)
    agree(head, target, circle, 1.0)
    return head.eval()


@torch.no_grad()
def agree(draft: Weighted, target: LlamaForCausalLM, circle: Circle, agreement: float) -> None:
    """From now on, in this share of tokens. In place and in the stream's order: graphs and steps go on."""
    embeddings = target.embedding.weight
    before, exactly = circle.before(agreement).to(draft.device), circle.before(1.0).to(draft.device)
    if isinstance(draft, LlamaForCausalLM):
        draft.head.weight[: circle.size] = draft.embedding.weight[before]
    elif isinstance(draft, MedusaHeads):
        for output in draft.outputs:
            before = exactly[before]
            output.weight[: circle.size] = embeddings[before]
    elif isinstance(draft, EagleHead) and draft.embedding is not None:
        draft.embedding.weight[before] = embeddings[exactly]
    elif isinstance(draft, EagleHead):
        draft.head.weight[: circle.size] = _told_by_attention(draft, embeddings[before])


def _told_by_attention(head: EagleHead, embeddings: Tensor) -> Tensor:
    """[tokens, hidden]: what positions of these embeddings, [tokens, hidden], get that attend to themselves alone."""
    norm, _ = head.first.norms
    attention = head.first.attention
    *_, values = attention.qkv.weight.split(list(attention.qkv.outputs.values()))
    own = F.linear(norm(embeddings), values[:, : embeddings.shape[1]])
    return F.linear(_for_each_head(own, head), attention.output.weight)


def _for_each_head(shared: Tensor, head: EagleHead) -> Tensor:
    """[n, KV heads * dim] to [n, heads * dim]."""
    config = head.config
    parts = shared.unflatten(1, (config.num_kv_heads, config.head_dim))
    return parts.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1).flatten(1)


def _at_random(model: Weighted, seed: int) -> None:
    """Activations are of about one, and what layers add of about ADDED."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0 if "norm" in name else 0.0)
        else:
            adds = name.endswith(("attention.output.weight", "mlp.down.weight"))
            parameter.normal_(0.0, (ADDED if adds else 1.0) * parameter.shape[1] ** -0.5)


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
