"""Llama, Mistral, Qwen2 and Qwen3: one module, told apart by config alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.alike import alike
from outrider_runtime.layers.attention import AttentionShape, attend
from outrider_runtime.layers.batch import Batch
from outrider_runtime.layers.embedding import Embedding
from outrider_runtime.layers.linear import MergedLinear
from outrider_runtime.layers.norm import RMSNorm
from outrider_runtime.layers.rope import RotaryEmbedding, Rotation, Turn
from outrider_runtime.models.causal import CausalLM
from outrider_runtime.models.config import ModelConfig


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(config, dtype, device)
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(config, index, dtype, device) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.head = (
            self.embedding
            if config.tie_word_embeddings
            else Embedding(config.vocab_size, config.hidden_size, dtype, device)
        )
        self.rope = RotaryEmbedding(config, device)
        self.attention_shape = AttentionShape(
            config.num_kv_heads, config.num_heads // config.num_kv_heads, config.sliding_window, dtype
        )
        self._tapped: dict[int, list[Tensor]] = {}

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        hidden = self.embedding(batch.token_ids)
        rotation = self.rope(batch.positions, self.dtype)
        for index, layer in enumerate(alike(self.layers)):
            self._tap(index, hidden)
            hidden = layer(hidden, rotation, batch, cache)
        self._tap(len(self.layers), hidden)
        normed: Tensor = self.norm(hidden)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head.logits(hidden)
        return logits

    @property
    def output(self) -> Tensor | None:
        return self.head.weight

    def tap(self, layers: Sequence[int], tokens: int) -> None:
        size = self.config.hidden_size
        self.taps = torch.zeros(tokens, len(layers) * size, dtype=self.dtype, device=self.device)
        self._tapped = defaultdict(list)
        for layer, place in zip(layers, self.taps.chunk(len(layers), dim=1), strict=True):
            self._tapped[layer].append(place)

    def embeddings(self) -> Tensor:
        return self.embedding.weight

    def _tap(self, layer: int, hidden: Tensor) -> None:
        for place in self._tapped.get(layer, ()):
            place[: len(hidden)] = hidden[: len(place)]

    def shards(self) -> dict[str, Tensor]:
        shards = self.embedding.shards("model.embed_tokens") | self.norm.shards("model.norm")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            shards |= layer.shards(f"model.layers.{index}")
        if self.head is not self.embedding:
            shards |= self.head.shards("lm_head")
        return shards


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.attention = Attention(config, index, dtype, device)
        self.mlp = MLP(config, dtype, device)
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def forward(self, hidden: Tensor, rotation: Rotation, batch: Batch, cache: KVCache) -> Tensor:
        """[tokens, hidden] before the layer to those behind it; the former may be overwritten."""
        hidden = self.attention(hidden, self.attention_norm, rotation, batch, cache)
        result: Tensor = self.mlp(hidden, self.mlp_norm)
        return result

    def shards(self, name: str) -> dict[str, Tensor]:
        return (
            self.attention.shards(f"{name}.self_attn")
            | self.mlp.shards(f"{name}.mlp")
            | self.attention_norm.shards(f"{name}.input_layernorm")
            | self.mlp_norm.shards(f"{name}.post_attention_layernorm")
        )


class Attention(nn.Module):
    """`inputs`: the size of what it attends from, where that is not the hidden state's."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        device: torch.device | str,
        inputs: int | None = None,
    ) -> None:
        super().__init__()
        self.index = index
        self.scale = config.head_dim**-0.5
        sizes = {
            "q_proj": config.num_heads * config.head_dim,
            "k_proj": config.num_kv_heads * config.head_dim,
            "v_proj": config.num_kv_heads * config.head_dim,
        }
        self.qkv = MergedLinear(inputs or config.hidden_size, sizes, config.attention_bias, dtype, device)
        self.output = MergedLinear(sizes["q_proj"], {"o_proj": config.hidden_size}, config.output_bias, dtype, device)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)
            self.key_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)

    def forward(self, hidden: Tensor, norm: RMSNorm, rotation: Rotation, batch: Batch, cache: KVCache) -> Tensor:
        """`hidden`, [tokens, hidden], plus the attention of its norm."""
        return self.added(hidden, norm, hidden, rotation, batch, cache)

    def added(
        self,
        inputs: Tensor,
        norm: RMSNorm | None,
        residual: Tensor,
        rotation: Rotation,
        batch: Batch,
        cache: KVCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """`residual`, [tokens, hidden], plus the attention of `inputs`, [tokens, inputs], normed first if need be.
        `rows`: of these tokens alone, whose are the residual and the batch's plan."""
        head_norms = None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)
        keys, values = cache.layers[self.index]
        query = self.qkv.turned(inputs, norm, Turn(*rotation, keys, values, batch.slots), head_norms, rows)
        attended = attend(query, keys, values, batch.attention, self.scale)
        return self.output.added(attended.flatten(1), residual)

    def shards(self, name: str) -> dict[str, Tensor]:
        # The projections are the layer's own children in a checkpoint: their names hang on `name` itself.
        shards = self.qkv.shards(name) | self.output.shards(name)
        if self.query_norm is not None and self.key_norm is not None:
            shards |= self.query_norm.shards(f"{name}.q_norm") | self.key_norm.shards(f"{name}.k_norm")
        return shards


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        sizes = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up = MergedLinear(config.hidden_size, sizes, config.mlp_bias, dtype, device)
        self.down = MergedLinear(
            config.intermediate_size, {"down_proj": config.hidden_size}, config.mlp_bias, dtype, device
        )

    def forward(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """`hidden`, [tokens, hidden], plus the network of its norm."""
        return self.down.added(self.gate_up.gated(hidden, norm), hidden)

    def shards(self, name: str) -> dict[str, Tensor]:
        return self.gate_up.shards(name) | self.down.shards(name)
