"""The shape of a Llama-family model, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider_runtime.errors import Refusal

# architecture -> (bias on q, k, v; norm on the heads of q and k)
ARCHITECTURES = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # as in config.json; None for plain RoPE
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    dtype: str = "float32"  # of the checkpoint
    eos_token_ids: tuple[int, ...] = field(default=())
    bos_token_id: int | None = None


def model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From the contents of config.json and generation_config.json. Raises Refusal(UnsupportedModel)."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise Refusal("UnsupportedModel", f"architecture {architecture}; supported: {', '.join(ARCHITECTURES)}")
    qkv_bias, qk_norm = ARCHITECTURES[architecture]
    heads = config["num_attention_heads"]
    # transformers >= 5 writes rope_parameters {rope_type, rope_theta, ...}; before, rope_theta and rope_scaling
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    eos = (generation or {}).get("eos_token_id", config.get("eos_token_id"))
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return ModelConfig(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rope_scaling=None if rope_type == "default" else {**rope, "rope_type": rope_type},
        attention_bias=bool(config.get("attention_bias", False)) or qkv_bias,
        output_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=qk_norm,
        sliding_window=window,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_token_id=config.get("bos_token_id"),
    )
