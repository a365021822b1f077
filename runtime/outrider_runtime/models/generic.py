"""Causal language models that transformers' code runs, with our paged attention under its attention interface.

A flattened batch is to transformers one sequence without a mask; who sees what is the attention's own knowledge. The
architectures are listed in config.py: those whose logits tests hold to transformers' own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPast

from outrider_runtime.errors import Refusal, in_a_line
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.attention import AttentionShape, attend
from outrider_runtime.layers.batch import Batch
from outrider_runtime.models.causal import CausalLM
from outrider_runtime.models.config import ModelConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose frequencies do not depend on the text's length
INTERFACE = "outrider"
# What a tensor is called in checkpoints, where transformers' module calls it otherwise.
ON_DISK = {"GPTNeoXForCausalLM": {"lm_head.weight": "embed_out.weight"}}


class GenericForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(config, dtype, device)
        asked = _examined(json.dumps(config.transformers)).layers
        self.attention_shape = AttentionShape(
            config.num_kv_heads,
            config.num_heads // config.num_kv_heads,
            config.sliding_window,
            dtype,
            full_layers=config.sliding_window is not None and any(layer.window is None for layer in asked),
            softcap=asked[0].softcap,
        )
        model = _instantiate(config.transformers or {}, dtype, device)
        self._shards = _tensors(model)
        # The head's own forward scales or bounds logits as its architecture does; it gets what the body has made.
        self.body: nn.Module = model.base_model
        setattr(model, model.base_model_prefix, _Made())
        self.head: nn.Module = model

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return _through(self.body, batch.token_ids, batch.positions, _Paged(batch, cache))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits

    def shards(self) -> dict[str, Tensor]:
        return dict(self._shards)


def generic_config(config: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """From the contents of config.json. Raises Refusal(UnsupportedModel)."""
    architecture = config["architectures"][0]
    with _validated(architecture):
        theirs = _their_config(config)
    for rope in _ropes(getattr(theirs, "rope_parameters", None) or {}):
        if (kind := rope.get("rope_type", "default")) not in ROPE_TYPES:
            raise _unsupported(architecture, f"rope_type {kind}; supported: {', '.join(ROPE_TYPES)}")
    with _validated(architecture):
        layers = _examined(json.dumps(config)).layers
    if len({(layer.heads, layer.kv_heads, layer.dim, layer.softcap) for layer in layers}) != 1:
        raise _unsupported(architecture, "layers of different attention; supported: a window on some of them")
    windows = {layer.window for layer in layers} - {None}
    if len(windows) > 1:
        raise _unsupported(architecture, f"windows of {sorted(map(str, windows))} tokens; supported: one size")
    return ModelConfig(
        architecture=architecture,
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_layers=len(layers),
        num_heads=layers[0].heads,
        num_kv_heads=layers[0].kv_heads,
        head_dim=layers[0].dim,
        max_position_embeddings=theirs.max_position_embeddings,
        sliding_window=windows.pop() if windows else None,
        tie_word_embeddings=bool(theirs.tie_word_embeddings),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=eos_token_ids,
        bos_token_id=theirs.bos_token_id,
        transformers=dict(config),
    )


@contextmanager
def _validated(architecture: str) -> Iterator[None]:
    """Raises Refusal for what transformers raises: it validates by exceptions of many kinds."""
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        raise _unsupported(architecture, f"config.json is not valid: {in_a_line(error)}") from error


def generic_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this shape holds, by its name there."""
    return dict(_examined(json.dumps(config.transformers)).tensors)


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a layer asks of its attention."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class _Examined:
    tensors: Mapping[str, tuple[int, ...]]
    layers: tuple[_Layer, ...]


@cache
def _examined(config: str) -> _Examined:
    """Run once without memory: what the layers really do is not told by the names in a config."""
    model = _instantiate(json.loads(config), torch.float32, "meta")
    layers: list[_Layer] = []

    class Recorder:
        def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, **asked: Any) -> Tensor:
            layers.append(_Layer(query.shape[1], key.shape[1], key.shape[2], asked["window"], asked["softcap"]))
            return query

    tokens = torch.zeros(2, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        _through(model.base_model, tokens, tokens, Recorder())
    return _Examined({name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}, tuple(layers))


class _Attention(Protocol):
    def attend(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Of layer `index`; query [tokens, heads, dim], key and value [tokens, kv heads, dim]."""


@dataclass(frozen=True, slots=True)
class _Paged:
    batch: Batch
    cache: KVCache

    def attend(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,  # the same in all layers, so the plan knows it
    ) -> Tensor:
        keys, values = self.cache.layers[index]
        keys[self.batch.slots], values[self.batch.slots] = key, value
        return attend(query.contiguous(), keys, values, self.batch.attention, scale, windowed=window is not None)


def _through(body: nn.Module, token_ids: Tensor, positions: Tensor, attention: _Attention) -> Tensor:
    """[tokens] to hidden states after the last norm, [tokens, hidden]."""
    output = body(
        input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, outrider=attention
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    outrider: _Attention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: query, key and value are [1, heads, tokens, dim]; returns [1, tokens, heads, dim]."""
    rows = (each[0].transpose(0, 1) for each in (query, key, value))
    index: int = module.layer_idx  # type: ignore[assignment]  # nn.Module may hold anything
    attended = outrider.attend(index, *rows, scale=scaling, window=sliding_window, softcap=softcap)
    return attended.unsqueeze(0), None


transformers.AttentionInterface.register(INTERFACE, _interface)


class _Made(nn.Module):
    """In the body's place: what is given as embeddings is what the body has made of them."""

    def forward(self, input_ids: None = None, *, inputs_embeds: Tensor, **_: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def _instantiate(config: Mapping[str, Any], dtype: torch.dtype, device: torch.device | str) -> Any:
    """Weights uninitialised; tables that are derived from the shape are in place."""
    theirs, model_class = _their_config(config), _class(config["architectures"][0])
    with torch.device(device), no_init_weights():
        model = model_class._from_config(theirs, dtype=dtype, attn_implementation=INTERFACE)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def _tensors(model: Any) -> dict[str, Tensor]:
    """What a checkpoint holds, once each: a tied head is its embedding."""
    names = ON_DISK.get(type(model).__name__, {})
    return {names.get(name, name): parameter for name, parameter in model.named_parameters()}


def _their_config(config: Mapping[str, Any]) -> Any:
    return _class(config["architectures"][0]).config_class.from_dict(deepcopy(dict(config)))


def _class(architecture: str) -> Any:
    if (found := getattr(transformers, architecture, None)) is None:
        raise _unsupported(architecture, f"transformers {transformers.__version__} does not know it")
    return found


def _ropes(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """One, or one for each type of layer."""
    return [each for each in parameters.values() if isinstance(each, Mapping)] or [parameters]


def _unsupported(architecture: str, message: str) -> Refusal:
    return Refusal("UnsupportedModel", f"{architecture}: {message}")
