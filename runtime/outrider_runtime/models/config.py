"""The shape of a model, from its config.json: what is supported is read, the rest is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider_runtime.errors import Refusal

if TYPE_CHECKING:
    from outrider_runtime.models.eagle_config import EagleShape
    from outrider_runtime.models.medusa_config import MedusaShape

# architecture -> (bias on q, k, v; norm on the heads of q and k)
ARCHITECTURES = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}
# Run by transformers' code, with our attention (models/generic.py)
GENERIC_ARCHITECTURES = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GPTNeoXForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "Starcoder2ForCausalLM",
    "GraniteForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "SmolLM3ForCausalLM",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "ArceeForCausalLM",
    "HeliumForCausalLM",
    "Exaone4ForCausalLM",
    "SeedOssForCausalLM",
    "MinistralForCausalLM",
)
# Where config.json says how weights are quantized: transformers', compressed-tensors' own before it, MLX's
QUANTIZATIONS = ("quantization_config", "compression_config", "quantization")
# rope type -> what its scaling must say
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),  # all of it has defaults
}
ROPE_NUMBERS = (  # of any of them, where it says them
    *ROPE_TYPES["llama3"],
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
)


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
    sliding_window: int | None = None  # tokens a token sees, itself included; of every layer
    tie_word_embeddings: bool = False
    dtype: str = "float32"  # of the checkpoint
    eos_token_ids: tuple[int, ...] = field(default=())
    bos_token_id: int | None = None
    transformers: Mapping[str, Any] | None = None  # config.json, where transformers' code runs the model
    head: EagleShape | MedusaShape | None = None  # of what drafts from a target's hidden states


def model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From the contents of config.json and generation_config.json. Raises Refusal(UnsupportedModel)."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in (*ARCHITECTURES, *GENERIC_ARCHITECTURES):
        supported = ", ".join((*ARCHITECTURES, *GENERIC_ARCHITECTURES))
        raise unsupported(f"architecture {architecture}; supported: {supported}")
    if method := quantized_by(config):
        raise unsupported(
            f"the checkpoint is quantized by {method}; give one in bfloat16, float16 or float32, or a GGUF file"
        )
    eos = (generation or {}).get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if strange := [each for each in eos_token_ids if type(each) is not int]:
        raise unsupported(f"eos_token_id has {strange[0]!r}, which is no token id; give the model's own config files")
    if architecture in GENERIC_ARCHITECTURES:
        from outrider_runtime.models.generic import generic_config  # imports transformers, which takes seconds

        return generic_config(config, eos_token_ids)
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise unsupported(f"hidden_act {act}; supported: silu")
    qkv_bias, qk_norm = ARCHITECTURES[architecture]
    # Qwen2's and Mistral's code knows no such field
    attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(config.get("attention_bias"))
    heads = size_of(config, "num_attention_heads")
    kv_heads = size_of(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise unsupported(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    layers = size_of(config, "num_hidden_layers")
    rope_theta, rope_scaling = rope_of(config)
    context = _context(config, rope_scaling)
    return ModelConfig(
        architecture=architecture,
        vocab_size=size_of(config, "vocab_size"),
        hidden_size=size_of(config, "hidden_size"),
        intermediate_size=size_of(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size_of(config, "head_dim", 128 if qk_norm else size_of(config, "hidden_size") // heads),
        max_position_embeddings=context,
        rms_norm_eps=number_of(config, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        attention_bias=attention_bias or qkv_bias,
        output_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias")),
        qk_norm=qk_norm,
        sliding_window=_sliding_window(architecture, layers, config, context),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=eos_token_ids,
        bos_token_id=config.get("bos_token_id"),
    )


def quantized_by(config: Mapping[str, Any]) -> str | None:
    """The method, as config.json names it; None for plain weights."""
    if not (told := next(filter(None, map(config.get, QUANTIZATIONS)), None)):
        return None
    return str(told.get("quant_method", "an unnamed method") if isinstance(told, Mapping) else told)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this shape holds, by its name in Hugging Face's format."""
    if config.transformers is not None:
        from outrider_runtime.models.generic import generic_tensor_shapes  # imports transformers

        return generic_tensor_shapes(config)
    if config.head is not None:
        return config.head.tensor_shapes(config)
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def layer_shapes(config: ModelConfig, inputs: int | None = None) -> dict[str, tuple[int, ...]]:
    """A decoder layer's tensors by their names in it. `inputs`: the size of what it attends from, if not the hidden
    state's."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, rows, columns, bias in (
        ("self_attn.q_proj", q, inputs or hidden, config.attention_bias),
        ("self_attn.k_proj", kv, inputs or hidden, config.attention_bias),
        ("self_attn.v_proj", kv, inputs or hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, q, config.output_bias),
        ("mlp.gate_proj", ffn, hidden, config.mlp_bias),
        ("mlp.up_proj", ffn, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, ffn, config.mlp_bias),
    ):
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
    return layer


def rope_of(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """(theta, scaling). transformers >= 5 writes rope_parameters; before, rope_theta and rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise unsupported(f"rope_scaling is {rope!r} in config.json; it must be an object or null")
    theta = float(number_of(rope if rope.get("rope_theta") else config, "rope_theta", 0) or 10000.0)
    rope_type = str(rope.get("rope_type") or rope.get("type") or "default")
    if rope_type not in ROPE_TYPES:
        raise unsupported(f"rope_type {rope_type}; supported: {', '.join(ROPE_TYPES)}")
    for name in ROPE_NUMBERS:
        number_of(rope, name, 0)
    for name in ROPE_TYPES[rope_type]:
        if rope.get(name) is None:
            raise unsupported(f"rope_type {rope_type} without {name}; give the model's own config.json")
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise unsupported(f"partial_rotary_factor {partial}; supported: 1")
    return theta, None if rope_type == "default" else {**rope, "rope_type": rope_type}


def _context(config: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> int:
    """Tokens. Whoever switches YaRN on as Qwen's model cards say leaves max_position_embeddings as it was before."""
    own = size_of(config, "max_position_embeddings")
    if scaling is None or scaling["rope_type"] != "yarn":
        return own
    trained, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    return max(own, int(trained * factor)) if trained and factor else own


def _sliding_window(architecture: str, layers: int, config: Mapping[str, Any], context: int) -> int | None:
    """The one window of all layers, or None. Qwen switches it on by a flag and from a layer on, Mistral by a number."""
    if architecture == "LlamaForCausalLM":
        return None
    mistral = architecture == "MistralForCausalLM"
    if not config.get("sliding_window", 4096) or not (mistral or config.get("use_sliding_window", False)):
        return None
    window = size_of(config, "sliding_window", 4096)
    if window >= context:
        return None
    types = config.get("layer_types")
    windowed = types.count("sliding_attention") if types else layers
    if not types and not mistral:
        windowed = max(0, layers - config.get("max_window_layers", 28))
    if windowed not in (0, layers):
        raise unsupported(f"a sliding window on {windowed} of {layers} layers; supported: on all or none")
    return window if windowed else None


def size_of(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "is missing" if value is None else f"is {value!r}"
        raise unsupported(f"{name} {found} in config.json; it must be a positive integer")
    return value


def number_of(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise unsupported(f"{name} is {value!r} in config.json; it must be a number")
    return value


def unsupported(message: str) -> Refusal:
    return Refusal("UnsupportedModel", message)
