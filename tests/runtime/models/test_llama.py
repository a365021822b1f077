"""Our logits are transformers' logits, however a text is cut into steps and mixed with others."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.models.steps import assert_logits_are_those_of
from tests.runtime.tiny import ours, reference_model, tiny_pair

from outrider_runtime.errors import Refusal
from outrider_runtime.models.config import model_config
from outrider_runtime.models.llama import LlamaForCausalLM

LLAMA, MISTRAL, QWEN2, QWEN3 = (f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3"))
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
TIED = {"tie_word_embeddings": True}
BIASED = {"attention_bias": True, "mlp_bias": True}
# architecture, KV heads, query heads for each, head size, rope, what else
SHAPES = [
    (LLAMA, 4, 1, 64, PLAIN, {}),
    (LLAMA, 2, 2, 96, LLAMA3, TIED),
    (LLAMA, 1, 4, 128, LINEAR, BIASED),
    (LLAMA, 1, 8, 64, YARN, {**TIED, **BIASED}),
    (LLAMA, 2, 4, 256, LLAMA3, {}),
    (LLAMA, 3, 1, 8, PLAIN, TIED),
    (MISTRAL, 2, 4, 128, PLAIN, {"sliding_window": None}),
    (MISTRAL, 1, 8, 64, PLAIN, {"sliding_window": 5}),
    (MISTRAL, 2, 1, 96, YARN, {"sliding_window": 1}),
    (MISTRAL, 1, 2, 256, LINEAR, {"sliding_window": 50, **TIED}),
    (QWEN2, 1, 8, 128, PLAIN, {}),
    (QWEN2, 2, 2, 64, YARN, TIED),
    (QWEN2, 1, 4, 96, PLAIN, {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0}),
    (QWEN3, 2, 2, 128, PLAIN, {}),
    (QWEN3, 1, 8, 96, YARN, TIED),
    (QWEN3, 1, 1, 256, PLAIN, {"attention_bias": True}),
    (QWEN3, 1, 4, 64, PLAIN, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
]


@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_logits_are_those_of_transformers(case):
    architecture, kv_heads, shared, head_dim, rope, changes = SHAPES[case]
    reference = reference_model(
        architecture,
        seed=case,
        hidden_size=48,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * shared,
        head_dim=head_dim,
        rope_parameters=rope,
        **changes,
    )
    assert_logits_are_those_of(reference, ours(reference))


def test_a_checkpoint_that_does_not_fit_is_refused_by_name():
    reference, model = tiny_pair()
    tensors = dict(reference.state_dict())
    tensors["model.extra.weight"] = torch.zeros(1)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(Refusal) as refused:
        LlamaForCausalLM(model.config, torch.float32, "cpu").load(tensors.items())
    assert refused.value.reason == "UnsupportedModel"
    assert refused.value.message == (
        "the checkpoint's tensors do not fit LlamaForCausalLM: missing: model.layers.1.self_attn.k_proj.weight; "
        "unexpected: model.extra.weight; "
        "misshaped: model.layers.0.mlp.down_proj.weight is [3, 3], config.json says [32, 48]"
    )


def test_an_output_head_in_a_tied_checkpoint_is_passed_over():
    reference = reference_model(tie_word_embeddings=True)
    tensors = dict(reference.state_dict())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    LlamaForCausalLM(model_config(reference.config.to_dict()), torch.float32, "cpu").load(tensors.items())


def test_an_unknown_rope_is_refused():
    reference = reference_model()
    config = reference.config.to_dict() | {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}
    with pytest.raises(Refusal, match="rope_type spiral; supported: default, linear, llama3, yarn"):
        LlamaForCausalLM(model_config(config), torch.float32, "cpu")
