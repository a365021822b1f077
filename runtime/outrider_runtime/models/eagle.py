"""EAGLE heads: a decoder layer that goes on from the target's hidden states, and from its own behind them.

An entry of theirs is a token and the hidden state of the position before it. It lies in the KV cache at its token's
position, so that what a block holds depends on its own prefix alone; at position 0 there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider_runtime.errors import Refusal
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.attention import AttentionShape
from outrider_runtime.layers.batch import Batch
from outrider_runtime.layers.embedding import Embedding
from outrider_runtime.layers.linear import MergedLinear, linear
from outrider_runtime.layers.norm import RMSNorm
from outrider_runtime.layers.pair import pair
from outrider_runtime.layers.rope import RotaryEmbedding, Rotation
from outrider_runtime.layers.rows import take_rows
from outrider_runtime.models.causal import CausalLM, Weighted
from outrider_runtime.models.config import ModelConfig
from outrider_runtime.models.eagle_config import EagleShape
from outrider_runtime.models.llama import MLP, Attention, DecoderLayer


class EagleHead(Weighted):
    """Embedding and output head are the target's where it has none: attach() first."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(config, dtype, device)
        assert isinstance(config.head, EagleShape)
        self.shape = shape = config.head
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embedding = Embedding(config.vocab_size, hidden, dtype, device) if shape.own_embedding else None
        self.fc = MergedLinear(shape.inputs, {"fc": hidden}, shape.fc_bias, dtype, device)
        self.input_norm = RMSNorm(shape.inputs, eps, dtype, device) if shape.input_norm else None
        self.tap_norms = nn.ModuleList(RMSNorm(shape.target_hidden_size, eps, dtype, device) for _ in shape.tap_norms)
        self.first = FirstLayer(config, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(config, i, dtype, device) for i in range(1, config.num_layers))
        self.norm = RMSNorm(hidden, eps, dtype, device) if shape.version == 3 else None
        self.head = Embedding(shape.head_rows, hidden, dtype, device) if shape.head_rows is not None else None
        # What d2t says: a row's token id less its index
        self.offsets = torch.zeros(shape.head_rows or 0, dtype=torch.int64, device=device)
        self.token_ids: Tensor | None = None  # [rows of the head] int64; None: they are the first ones in order
        self.rope = RotaryEmbedding(config, device)
        shared = config.num_heads // config.num_kv_heads
        self.attention_shape = AttentionShape(config.num_kv_heads, shared, config.sliding_window, dtype, first=1)
        self._target: list[CausalLM] = []  # in a list: it is no part of this module

    def attach(self, target: CausalLM, tokens: int) -> None:
        """To the model that it drafts for, in steps of up to `tokens`; its own weights are read by now. Raises
        Refusal(UnsupportedModel)."""
        self._target = [target]
        if self.shape.tapped:
            target.tap(self.shape.tapped, tokens)
        self._embeddings = (target.embeddings() if self.embedding is None else self.embedding.weight).detach()
        if self.shape.mapped:
            rows = torch.arange(len(self.offsets), device=self.device)
            self.token_ids = rows + self.offsets

    def check(self, target: ModelConfig) -> None:
        rows = torch.arange(len(self.offsets), device=self.device)
        token_ids = rows + self.offsets
        if self.shape.mapped and not bool(((token_ids >= 0) & (token_ids < target.vocab_size)).all()):
            outside = int(token_ids[(token_ids < 0) | (token_ids >= target.vocab_size)][0])
            raise Refusal(
                "UnsupportedModel",
                f"d2t maps a row of the draft's head to token {outside}, the target's vocabulary has "
                f"{target.vocab_size}; give the head that was trained for this target",
            )

    @torch.inference_mode()
    def states(self, hidden: Tensor) -> Tensor:
        """What entries begin with, [tokens, hidden], of the target's last hidden states, [tokens, target's hidden]; of
        what it tapped in the same step, if it taps."""
        if self.shape.version == 1:
            return hidden
        tapped = self._target[0].taps
        assert tapped is not None
        hidden = tapped[: len(hidden)]
        if self.tap_norms:
            parts = hidden.chunk(len(self.tap_norms), dim=1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], dim=1)
        combined: Tensor = self.fc(hidden, self.input_norm)
        return combined

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        states: Tensor,
        cache: KVCache,
        rows: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Entries of the batch's tokens and of the `states` [tokens, hidden] of the positions before them, which may be
        overwritten, to the states of their own positions. Writes their KV. `rows`: to the states of these alone, whose
        queries a single layer's batch plans alone. `rotation`: that of the positions, where it is there already."""
        rotation = rotation or self.rope(batch.positions, self.dtype)
        pairs = pair(self._embeddings, batch.token_ids, states, self.first.norms)
        if self.shape.version == 1:
            pairs = states = self.fc(pairs)
        elif self.shape.norm_before_residual:
            states = pairs[:, self.config.hidden_size :]
        hidden: Tensor = self.first(pairs, states, rotation, batch, cache, None if self.layers else rows)
        for layer in self.layers:
            hidden = layer(hidden, rotation, batch, cache)
        if self.layers and rows is not None:
            hidden = take_rows(hidden, rows)
        return self.norm(hidden) if self.norm is not None and self.shape.norm_output else hidden

    @torch.inference_mode()
    def rotations(self, positions: Tensor) -> list[Rotation]:
        """Of each of [turns, tokens] positions, at once."""
        cosines, sines = self.rope(positions.flatten(), self.dtype)
        shape = (*positions.shape, *cosines.shape[1:])
        return list(zip(cosines.view(shape), sines.view(shape), strict=True))

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """[rows, hidden] to [rows, rows of the head]."""
        norm = None if self.shape.norm_output else self.norm
        if self.head is not None:
            return linear(states, self.head.weight, None, norm)
        return self._target[0].logits(states if norm is None else norm(states))

    def shards(self) -> dict[str, Tensor]:
        shape = self.shape
        shards = self.first.shards(shape.first_layer) | {"fc.weight": self.fc.weight}
        if self.fc.bias is not None:
            shards["fc.bias"] = self.fc.bias
        for index, layer in enumerate(self.layers, start=1):
            assert isinstance(layer, DecoderLayer)
            shards |= layer.shards(f"layers.{index}")
        names = ("embed_tokens", "input_norm", "norm", "lm_head", *shape.tap_norms)
        modules = (self.embedding, self.input_norm, self.norm, self.head, *self.tap_norms)
        for name, module in zip(names, modules, strict=True):
            if isinstance(module, Embedding | RMSNorm):
                shards |= module.shards(name)
        return shards | ({"d2t": self.offsets} if shape.mapped else {})


class FirstLayer(nn.Module):
    """A decoder layer without a norm of its own before its attention, which is over `pairs` of embedding and state."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        assert isinstance(config.head, EagleShape)
        paired = config.head.version == 3
        self.attention = Attention(config, 0, dtype, device, inputs=2 * hidden if paired else None)
        self.mlp = MLP(config, dtype, device)
        self.mlp_norm = RMSNorm(hidden, eps, dtype, device)
        self.embedding_norm = RMSNorm(hidden, eps, dtype, device) if paired else None
        self.state_norm = RMSNorm(hidden, eps, dtype, device) if paired else None

    @property
    def norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Of what pairs are made of."""
        return (
            None if self.embedding_norm is None or self.state_norm is None else (self.embedding_norm, self.state_norm)
        )

    def forward(
        self,
        inputs: Tensor,
        residual: Tensor,
        rotation: Rotation,
        batch: Batch,
        cache: KVCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """`residual`, [tokens, hidden], which may be overwritten, plus attention from `inputs`, and then as usual.
        `rows`: of these tokens alone; of the others there is their KV."""
        residual = residual.contiguous() if rows is None else take_rows(residual, rows)
        hidden = self.attention.added(inputs, None, residual, rotation, batch, cache, rows)
        result: Tensor = self.mlp(hidden, self.mlp_norm)
        return result

    def shards(self, name: str) -> dict[str, Tensor]:
        shards = (
            self.attention.shards(f"{name}.self_attn")
            | self.mlp.shards(f"{name}.mlp")
            | self.mlp_norm.shards(f"{name}.post_attention_layernorm")
        )
        if self.norms is not None:
            shards |= self.norms[0].shards(f"{name}.input_layernorm") | self.norms[1].shards(f"{name}.hidden_norm")
        return shards
