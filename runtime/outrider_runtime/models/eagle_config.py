"""The shape of an EAGLE head, from its config.json and the tensors it has: published ones leave out what they please.

EAGLE-1 (Li et al., arXiv 2401.15077), whose weights EAGLE-2 uses, too, and EAGLE-3 (arXiv 2503.01840), as their
authors' repositories and the speculators library write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider_runtime.errors import Refusal
from outrider_runtime.models.config import (
    ModelConfig,
    layer_shapes,
    number_of,
    quantized_by,
    rope_of,
    size_of,
    unsupported,
)
from outrider_runtime.models.weights import Shapes

# Two forms of the same names
FIRST_LAYERS = ("midlayer", "layers.0")
TAP_NORMS = (("fc_norm.0", "fc_norm.1", "fc_norm.2"), ("aux_norm_low", "aux_norm_mid", "aux_norm_high"))


@dataclass(frozen=True, slots=True)
class EagleShape:
    """What an EAGLE head has beside its decoder layers. What it lacks it shares with its target."""

    version: int  # 1 or 3
    inputs: int  # size of what `fc` makes a hidden state of
    target_hidden_size: int
    first_layer: str  # its name in the checkpoint
    tapped: tuple[int, ...] = ()  # the target's layers whose inputs it reads; EAGLE-1 reads the last hidden state
    fc_bias: bool = False
    own_embedding: bool = False
    head_rows: int | None = None  # of its own output head
    mapped: bool = False  # d2t says which of the target's ids those rows are
    input_norm: bool = False  # of all tapped inputs together
    tap_norms: tuple[str, ...] = ()  # of each, by their names
    norm_before_residual: bool = False
    norm_output: bool = False  # it is fed its normed output

    def __str__(self) -> str:
        reads = f"reads layers {', '.join(map(str, self.tapped))}" if self.tapped else "reads the last hidden state"
        tokens = f", drafts {self.head_rows} tokens" if self.head_rows is not None else ""
        return f"EAGLE-{self.version} head, {reads}{tokens}"

    def tensor_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor, by its name in the checkpoint."""
        hidden = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, self.inputs)}
        if self.fc_bias:
            shapes["fc.bias"] = (hidden,)
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
        if self.version == 1:
            first = layer_shapes(config)
            del first["input_layernorm.weight"]
        else:
            first = layer_shapes(config, 2 * hidden) | {"hidden_norm.weight": (hidden,)}
            shapes["norm.weight"] = (hidden,)
        shapes |= {f"{self.first_layer}.{name}": shape for name, shape in first.items()}
        for index in range(1, config.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer_shapes(config).items()}
        if self.input_norm:
            shapes["input_norm.weight"] = (self.inputs,)
        shapes |= {f"{name}.weight": (self.target_hidden_size,) for name in self.tap_norms}
        if self.head_rows is not None:
            shapes["lm_head.weight"] = (self.head_rows, hidden)
        if self.mapped:
            assert self.head_rows is not None
            shapes["d2t"] = (self.head_rows,)
        return shapes


def eagle_config(
    name: str, version: int, config: Mapping[str, Any], tensors: Shapes, target: ModelConfig
) -> ModelConfig:
    """Of the head called `name`, for this target. `config` is config.json. Raises Refusal."""
    flags, layer = _parts(name, config)
    _same_version(name, version, tensors)
    prefix = next((first for first in FIRST_LAYERS if f"{first}.mlp.gate_proj.weight" in tensors), FIRST_LAYERS[0])
    heads = size_of(layer, "num_attention_heads")
    hidden = size_of(layer, "hidden_size")
    if "fc.weight" not in tensors:
        raise _misfit(name, "fc.weight is missing, which makes a hidden state of the target's")
    inputs = tensors["fc.weight"][1]
    own_embedding = "embed_tokens.weight" in tensors
    tapped: tuple[int, ...] = ()
    taken = hidden if version == 1 else target.hidden_size
    if version == 3:
        tapped = _tapped(name, flags, target)
        if inputs != len(tapped) * target.hidden_size:
            raise _misfit(
                name,
                f"fc.weight takes {inputs} inputs, the target's {len(tapped)} tapped layers give {len(tapped)} x "
                f"{target.hidden_size}",
            )
    elif inputs != 2 * hidden:
        raise _misfit(name, f"fc.weight takes {inputs} inputs, not 2 x hidden_size {hidden}")
    if hidden != target.hidden_size and (version == 1 or not own_embedding):
        raise _misfit(name, f"its hidden_size is {hidden}, the target's {target.hidden_size}")
    own_head = version == 3 and "lm_head.weight" in tensors
    rows = tensors["lm_head.weight"][0] if own_head else None
    mapped = version == 3 and "d2t" in tensors
    if mapped and not own_head:
        raise _misfit(name, "d2t maps the rows of lm_head.weight, which is missing")
    if mapped and rows is not None and rows > target.vocab_size:
        raise _misfit(name, f"lm_head.weight has {rows} rows, the target's vocabulary {target.vocab_size}")
    if version == 3 and not own_head and hidden != target.hidden_size:
        raise _misfit(name, f"lm_head.weight is missing, and its hidden_size {hidden} is not the target's")
    theta, scaling = rope_of(layer)
    return ModelConfig(
        architecture=f"EAGLE-{version} head",
        vocab_size=tensors["embed_tokens.weight"][0] if own_embedding else target.vocab_size,
        hidden_size=hidden,
        intermediate_size=size_of(layer, "intermediate_size"),
        num_layers=max(1, *(_layer(tensor) + 1 for tensor in tensors)),
        num_heads=heads,
        num_kv_heads=size_of(layer, "num_key_value_heads", heads),
        head_dim=size_of(layer, "head_dim", hidden // heads),
        max_position_embeddings=size_of(layer, "max_position_embeddings", 2048),
        rms_norm_eps=number_of(layer, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=f"{prefix}.self_attn.q_proj.bias" in tensors,
        output_bias=f"{prefix}.self_attn.o_proj.bias" in tensors,
        mlp_bias=f"{prefix}.mlp.gate_proj.bias" in tensors,
        qk_norm=f"{prefix}.self_attn.q_norm.weight" in tensors,
        sliding_window=_window(layer),
        dtype=target.dtype,
        head=EagleShape(
            version=version,
            inputs=inputs,
            target_hidden_size=taken,
            first_layer=prefix,
            tapped=tapped,
            fc_bias="fc.bias" in tensors,
            own_embedding=own_embedding,
            head_rows=rows,
            mapped=mapped,
            input_norm=version == 3 and "input_norm.weight" in tensors,
            tap_norms=next((form for form in TAP_NORMS if version == 3 and f"{form[0]}.weight" in tensors), ()),
            norm_before_residual=bool(flags.get("norm_before_residual")),
            norm_output=bool(flags.get("norm_output")),
        ),
    )


def _parts(name: str, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What is said of the head, and of its decoder layers."""
    if method := quantized_by(config):
        raise unsupported(f"{name}: quantized by {method}; give a head in bfloat16, float16 or float32")
    flags: Mapping[str, Any]
    if (kind := config.get("speculators_model_type")) is not None:
        if kind != "eagle3":
            raise unsupported(f"{name}: speculators_model_type {kind}; supported: eagle3")
        layer = config.get("transformer_layer_config")
        if not isinstance(layer, Mapping):
            raise unsupported(f"{name}: transformer_layer_config is missing in config.json; download it again")
        flags = {"norm_before_residual": True, **config}
    else:
        inner = config.get("eagle_config") or {}
        if not isinstance(inner, Mapping):
            raise unsupported(f"{name}: eagle_config is {inner!r} in config.json; it must be an object")
        layer, flags = config, {**config, **inner}
    if (act := layer.get("hidden_act", "silu")) != "silu":
        raise unsupported(f"{name}: hidden_act {act}; supported: silu")
    return flags, layer


def _same_version(name: str, version: int, tensors: Shapes) -> None:
    third = any(f"{first}.hidden_norm.weight" in tensors for first in FIRST_LAYERS)
    if third and version == 1:
        raise _misfit(name, "hidden_norm.weight makes it an EAGLE-3 head", "use the method eagle3")
    if not third and version == 3:
        raise _misfit(name, "no hidden_norm.weight: it is no EAGLE-3 head", "use the method eagle, or another draft")
    if "mask_hidden" in tensors:
        raise unsupported(f"{name}: mask_hidden makes it a P-EAGLE head; supported: EAGLE-1, EAGLE-2 and EAGLE-3")


def _tapped(name: str, flags: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    layers = target.num_layers
    if flags.get("use_aux_hidden_state") is False:
        raise unsupported(f"{name}: use_aux_hidden_state false; supported: heads that read inner layers of the target")
    given = flags.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)
    if not isinstance(given, list | tuple) or not all(type(each) is int for each in given):
        raise unsupported(
            f"{name}: eagle_aux_hidden_state_layer_ids is {given!r} in config.json; it must be a list of layers"
        )
    tapped = tuple(given)
    if outside := [each for each in tapped if not 0 <= each <= layers]:
        raise _misfit(name, f"it reads layer {outside[0]} of a target that has {layers}")
    return tapped


def _layer(tensor: str) -> int:
    start, _, rest = tensor.partition(".")
    return int(rest.partition(".")[0]) if start == "layers" and rest.partition(".")[0].isdigit() else 0


def _window(layer: Mapping[str, Any]) -> int | None:
    types = layer.get("layer_types") or []
    if layer.get("sliding_window") and (layer.get("use_sliding_window") or "sliding_attention" in types):
        return size_of(layer, "sliding_window")
    return None


def _misfit(name: str, what: str, fix: str = "give the head that was trained for this target") -> Refusal:
    return Refusal("UnsupportedModel", f"{name}: {what}; {fix}")
