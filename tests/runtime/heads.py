"""Heads for tests: random ones as published checkpoints have them, and ones that know what their target will say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.runtime.tiny import VOCAB, reference_model
from torch import Tensor

from outrider_runtime.models.causal import CausalLM
from outrider_runtime.models.config import ModelConfig, model_config, tensor_shapes
from outrider_runtime.models.eagle import EagleHead
from outrider_runtime.models.eagle_config import eagle_config
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.models.medusa import MedusaHeads
from outrider_runtime.models.medusa_config import medusa_config
from outrider_runtime.models.registry import make_draft

HIDDEN = 32  # of the tiny models
HEAD = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
TAPPED = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}  # of a target of two layers


def tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0, scale: float = 0.3) -> dict[str, Tensor]:
    """Random ones, and norms around one."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor + 1 if "norm" in name else tensor for name, tensor in made.items()}


def eagle_tensors(version: int, seed: int = 0, layers: int = 1, **extra: tuple[int, ...]) -> dict[str, Tensor]:
    """As EAGLE-1's and EAGLE-3's authors write them; `extra` shapes by their names, '.' as '__'. They have a single
    layer; others come behind it."""
    layer = "midlayer" if version == 3 else "layers.0"
    shapes = _layer_shapes(layer, HIDDEN * (2 if version == 3 else 1))
    for behind in (f"layers.{index}" for index in range(1, layers)):
        shapes |= _layer_shapes(behind, HIDDEN) | {f"{behind}.input_layernorm.weight": (HIDDEN,)}
    if version == 3:
        shapes |= {f"{layer}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "hidden_norm")}
        shapes |= {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB - 20, HIDDEN)}
    else:
        shapes |= {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,), "embed_tokens.weight": (VOCAB, HIDDEN)}
    made = tensors({**shapes, **{name.replace("__", "."): shape for name, shape in extra.items()}}, seed)
    if version == 3:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[: VOCAB - 20].sort().values
        made |= {"d2t": ids - torch.arange(VOCAB - 20), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    return made


def _layer_shapes(layer: str, inputs: int, ffn: int = 40) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.self_attn.q_proj.weight": (HIDDEN, inputs),
        f"{layer}.self_attn.k_proj.weight": (HIDDEN // 2, inputs),
        f"{layer}.self_attn.v_proj.weight": (HIDDEN // 2, inputs),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}.mlp.gate_proj.weight": (ffn, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (ffn, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, ffn),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
    }


def medusa_tensors(heads: int = 4, blocks: int = 1, seed: int = 0) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{head}.{block}.linear.bias"] = (HIDDEN,)
        shapes[f"{head}.{blocks}.weight"] = (VOCAB, HIDDEN)
    return tensors(shapes, seed)


def write_head(folder: Path, made: Mapping[str, Tensor], config: Mapping[str, Any], name: str = "model") -> Path:
    """A folder as it is published."""
    folder.mkdir()
    save_file(dict(made), folder / f"{name}.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(config: ModelConfig, made: Mapping[str, Tensor], like: CausalLM | None = None) -> Any:
    """On the CPU, in float32, or as a target is."""
    dtype, device = (torch.float32, torch.device("cpu")) if like is None else (like.dtype, like.device)
    head = make_draft(config, dtype, device)
    assert set(tensor_shapes(config)) == set(head.shards())
    head.load((name, made[name]) for name in tensor_shapes(config))
    return head.eval()


def eagle_draft(version: int, target: CausalLM, layers: int = 1, **config: Any) -> EagleHead:
    """A random one, in the target's type and on its device."""
    made = eagle_tensors(version, layers=layers)
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    return loaded(eagle_config("head", version, {**HEAD, **TAPPED, **config}, shapes, target.config), made, target)


def medusa_draft(target: CausalLM) -> MedusaHeads:
    """Random ones, in the target's type and on its device."""
    made = medusa_tensors()
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    return loaded(medusa_config("heads", shapes, target.config), made, target)


def blurred(head: Any, scale: float) -> Any:
    """Its weights, a little off."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return head


def eagle_head(version: int, target: ModelConfig, made: Mapping[str, Tensor] | None = None, **config: Any) -> EagleHead:
    made = eagle_tensors(version) if made is None else made
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    return loaded(eagle_config("head", version, {**HEAD, **TAPPED, **config}, shapes, target), made)


def medusa_heads(target: ModelConfig, made: Mapping[str, Tensor] | None = None) -> MedusaHeads:
    made = medusa_tensors() if made is None else made
    return loaded(medusa_config("heads", {name: tuple(tensor.shape) for name, tensor in made.items()}, target), made)


def successor_target() -> LlamaForCausalLM:
    """Its layers do nothing, so the next token depends on the last one alone; the likeliest is a permutation of it."""
    reference = reference_model(tie_word_embeddings=False)
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        reference.model.norm.weight.fill_(1)
        embedded = torch.nn.functional.normalize(reference.model.embed_tokens.weight, dim=1)
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(8))
        reference.lm_head.weight[order] = embedded  # a token's own direction leads to its successor
    model = LlamaForCausalLM(model_config(reference.config.to_dict()), torch.float32, "cpu")
    model.load(reference.state_dict().items())
    return model.eval()


def knowing_eagle(version: int, target: LlamaForCausalLM, *, reduced: bool = False, rows: int = VOCAB) -> EagleHead:
    """Of successor_target(): it hands on the embedding of its entry's token, of which EAGLE-3 has seen a norm.
    `reduced`: an EAGLE-3 whose head has a part of the target's vocabulary."""
    one, nothing = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    made = eagle_tensors(version)
    for name, tensor in made.items():
        if name.endswith("down_proj.weight"):
            tensor.zero_()
    if version == 1:
        made["layers.0.self_attn.o_proj.weight"] = nothing
        made |= {"fc.weight": torch.cat((one, nothing), dim=1), "fc.bias": torch.zeros(HIDDEN)}
        made["embed_tokens.weight"] = torch.nn.functional.rms_norm(target.embedding.weight, (HIDDEN,), eps=1e-6)
        return eagle_head(1, target.config, padded(made, rows))
    layer = "midlayer"
    made[f"{layer}.self_attn.k_proj.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    made[f"{layer}.self_attn.v_proj.weight"] = torch.cat((one, nothing), dim=1)
    made[f"{layer}.self_attn.o_proj.weight"] = one
    made[f"{layer}.input_layernorm.weight"] = made["norm.weight"] = torch.ones(HIDDEN)
    made[f"{layer}.hidden_norm.weight"] = torch.zeros(HIDDEN)
    known = torch.arange(VOCAB - 20) + made.pop("d2t")
    made["lm_head.weight"] = target.head.weight[known if reduced else slice(None)].clone()
    if reduced:
        made["d2t"] = known - torch.arange(len(known))
    # A window of one: an entry sees itself alone.
    window = {"sliding_window": 1, "use_sliding_window": True, "norm_before_residual": True, "num_key_value_heads": 4}
    return eagle_head(3, target.config, padded(made, rows), **window)


def padded(made: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """With tables of so many tokens where they were of VOCAB. Those that nobody has are likelier than any."""
    sized = {name: torch.cat((tensor, 2 * tensor))[:rows] for name, tensor in made.items() if len(tensor) == VOCAB}
    return {**made, **sized}


def knowing_medusa(target: LlamaForCausalLM, heads: int = 4, rows: int = VOCAB) -> MedusaHeads:
    """Of successor_target(): each head goes one successor further."""
    embedded = torch.nn.functional.normalize(target.embedding.weight, dim=1)
    successor = (embedded @ target.head.weight.T).argmax(1)
    made = {name: torch.zeros_like(tensor) for name, tensor in medusa_tensors(heads).items()}
    further = successor
    for head in range(heads):
        output = torch.empty_like(target.head.weight)
        output[further] = target.head.weight
        made[f"{head}.1.weight"] = output
        further = successor[further]
    return medusa_heads(target.config, padded(made, rows))
