"""Rotary position embedding (Su et al., arXiv 2104.09864) and its usual stretchings to longer contexts.

Scaling parameters are config.json's `rope_scaling`, also called `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider_runtime.errors import Refusal
from outrider_runtime.layers.norm import RMSNorm
from outrider_runtime.models.config import ModelConfig

Scaling = Mapping[str, Any]
Rotation = tuple[Tensor, Tensor]  # cosines and sines of a step's positions


@dataclass(frozen=True, slots=True)
class Turn:
    """What a layer's queries and keys turn by, and where its keys and values are stored.

    `keys` and `values` are the layer's arrays, [cache slots, kv heads, dim]; slots [tokens], negative where nothing is
    to be stored.
    """

    cosines: Tensor  # [tokens, 1, dim], as rotate() takes them
    sines: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor


class RotaryEmbedding:
    """Cosines and sines of positions, computed once a step in float32 and shared by all layers."""

    def __init__(self, config: ModelConfig, device: torch.device | str) -> None:
        scaling = config.rope_scaling or {"rope_type": "default"}
        kind = scaling["rope_type"]
        if kind not in _SCALINGS:
            raise Refusal("UnsupportedModel", f"rope_type {kind}; supported: {', '.join(_SCALINGS)}")
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / config.rope_theta**exponents
        frequencies, self.magnitude = _SCALINGS[kind](frequencies, scaling, config)
        self.frequencies = frequencies.to(device)  # [dim / 2], radians per position

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """[tokens] positions to cosines and sines as rotate() takes them, each [tokens, 1, dim].

        On a CUDA device they stay float32, as the kernel that takes them rounds only its results.
        """
        if positions.is_cuda:
            from outrider_runtime.kernels.rope import rotation

            return rotation(positions, self.frequencies, self.magnitude)
        angles = positions.to(torch.float32).unsqueeze(-1) * self.frequencies
        cosines, sines = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        return (
            torch.cat((cosines, cosines), dim=-1).unsqueeze(1).to(dtype),
            torch.cat((-sines, sines), dim=-1).unsqueeze(1).to(dtype),
        )


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn [tokens, heads, dim] by its positions; element i is paired with i + dim / 2."""
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)


def split_qkv(qkv: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """A merged projection, [tokens, (heads + 2 * kv heads) * dim], in the parts that turn_and_store() takes."""
    kv = 2 * turn.keys[0].numel()
    return qkv[:, :-kv], qkv[:, -kv:]


def turn_and_store(
    queries: Tensor,
    kv: Tensor,
    turn: Turn,
    norms: tuple[RMSNorm, RMSNorm] | None,
    rows: Tensor | None = None,
) -> Tensor:
    """From a layer's projection to its attention: rotate queries and keys, store keys and values, return the queries.

    queries [tokens, heads * dim], or [rows, heads * dim] of these tokens alone; kv [tokens, 2 * kv heads * dim], the
    heads of keys, then of values; rows of both are dense. `norms`, of the heads of queries and keys, come before the
    rotation. Returns [tokens or rows, heads, dim].
    """
    if kv.is_cuda:
        from outrider_runtime.kernels import rope as kernel

        if norms is None:
            return kernel.turn_and_store(queries, kv, turn, rows)
        weights = norms[0].weight, norms[1].weight
        return kernel.turn_and_store(queries, kv, turn, rows, norms=weights, eps=norms[0].eps)
    kv_heads, dim = turn.keys.shape[1:]
    query = queries.view(len(queries), -1, dim)
    key, value = kv.view(len(kv), 2, kv_heads, dim).unbind(1)
    if norms is not None:
        query, key = norms[0](query), norms[1](key)
    stored = turn.slots >= 0
    turn.keys[turn.slots[stored]] = rotate(key, turn.cosines, turn.sines)[stored]
    turn.values[turn.slots[stored]] = value[stored]
    if rows is None:
        return rotate(query, turn.cosines, turn.sines)
    return rotate(query, turn.cosines[rows], turn.sines[rows])


def _default(frequencies: Tensor, scaling: Scaling, config: ModelConfig) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, scaling: Scaling, config: ModelConfig) -> tuple[Tensor, float]:
    return frequencies / scaling["factor"], 1.0


def _llama3(frequencies: Tensor, scaling: Scaling, config: ModelConfig) -> tuple[Tensor, float]:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the trained context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling["factor"]), 1.0


def _yarn(frequencies: Tensor, scaling: Scaling, config: ModelConfig) -> tuple[Tensor, float]:
    """Stretch by the number of turns within the trained context, and sharpen attention (Peng et al., 2309.00071)."""
    trained = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = scaling.get("factor") or config.max_position_embeddings / trained

    def dimension(turns: float) -> float:
        """The (fractional) pair of dimensions that turns so often within the trained context."""
        return config.head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32)
    stretched = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies * (1 - stretched + stretched / factor), _yarn_magnitude(factor, scaling)


def _yarn_magnitude(factor: float, scaling: Scaling) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


_SCALINGS: dict[str, Callable[[Tensor, Scaling, ModelConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
