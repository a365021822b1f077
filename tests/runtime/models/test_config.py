"""The shape read from config.json, old and new, and what is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from tests.runtime.tiny import reference_model

from outrider_runtime.errors import Refusal
from outrider_runtime.models.config import ARCHITECTURES, GENERIC_ARCHITECTURES, model_config, tensor_shapes

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500000.0, "rope_scaling": None}, 500000.0, None),
        ({"rope_theta": 500000.0, "rope_scaling": LLAMA3}, 500000.0, LLAMA3),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        ({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, 5e5, {"rope_theta": 5e5, **LLAMA3}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            10000.0,
            {"type": "linear", "factor": 2.0, "rope_type": "linear"},
        ),
    ],
)
def test_rope_is_read_as_transformers_4_and_5_write_it(changes, theta, scaling):
    config = model_config({**LLAMA, **changes})
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("own", "scaling", "context"),
    [
        (32768, YARN, 131072),  # Qwen2.5, as its model card switches it on
        (40960, {**YARN, "rope_type": "yarn"}, 131072),  # Qwen3's
        (131072, YARN, 131072),  # what was trained with it says so itself
        (163840, YARN, 163840),
        (32768, {"type": "yarn", "factor": 4.0}, 32768),  # of which nobody knows what it was before
        (131072, {**LLAMA3, "factor": 64.0}, 131072),
        (4096, {"type": "linear", "factor": 4.0}, 4096),
        (4096, None, 4096),
    ],
)
def test_yarn_reaches_as_far_as_it_stretches(own, scaling, context):
    config = model_config({**LLAMA, "max_position_embeddings": own, "rope_scaling": scaling})
    assert config.max_position_embeddings == context


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (LLAMA, None),
        (QWEN2, None),  # off unless switched on
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 16}, None),  # from layer 16 of 16 on
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, 4096),
        ({**QWEN2, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 16}, 4096),
        ({**QWEN2, "use_sliding_window": False, "layer_types": ["full_attention"] * 16}, None),
        (MISTRAL, 4096),  # what transformers takes when the field is absent
        ({**MISTRAL, "sliding_window": None}, None),
        ({**MISTRAL, "sliding_window": 1024}, 1024),
        ({**MISTRAL, "sliding_window": 4096, "max_position_embeddings": 4096}, None),  # never reached
        ({**MISTRAL, "sliding_window": 32768, "max_position_embeddings": 32768, "rope_scaling": YARN}, 32768),
    ],
)
def test_a_sliding_window_counts_only_where_the_architecture_says_so(config, window):
    assert model_config(config).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM; supported: LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "architecture none; supported"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized by awq; give one in bfloat16"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "quantized by compressed-tensors; give one"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantized by an unnamed method; give one"),
        ({"quantization": "fp8"}, "quantized by fp8; give one"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type longrope; supported: default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type dynamic; supported"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "rope_type llama3 without factor; give the model's own"),
        ({"rope_scaling": {**LLAMA3, "factor": "8.0"}}, "factor is '8.0' in config.json; it must be a number"),
        ({"rope_scaling": {**YARN, "factor": "4.0"}}, "factor is '4.0' in config.json; it must be a number"),
        ({"rope_scaling": {**YARN, "beta_fast": "32"}}, "beta_fast is '32' in config.json; it must be a number"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn' in config.json; it must be an object or null"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6' in config.json; it must be a number"),
        ({"rms_norm_eps": "1e-05"}, "rms_norm_eps is '1e-05' in config.json; it must be a number"),
        ({"eos_token_id": "2"}, "eos_token_id has '2', which is no token id"),
        ({"eos_token_id": [2, None]}, "eos_token_id has None, which is no token id"),
        ({**MISTRAL, "sliding_window": "4096"}, "sliding_window is '4096' in config.json; it must be a positive int"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; supported: 1"),
        ({"hidden_act": "gelu"}, "hidden_act gelu; supported: silu"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing in config.json"),
        ({"vocab_size": "many"}, "vocab_size is 'many' in config.json; it must be a positive integer"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, told):
    with pytest.raises(Refusal) as refusal:
        model_config({**LLAMA, **changes})
    assert refusal.value.reason == "UnsupportedModel"
    assert told in refusal.value.message


def test_the_documentation_lists_what_is_supported():
    listed = re.findall(r"`(\w+ForCausalLM)`", (Path(__file__).parents[3] / "docs/models.md").read_text())
    assert listed == [*ARCHITECTURES, *listed[len(ARCHITECTURES) :]]
    assert sorted(listed) == sorted([*ARCHITECTURES, *GENERIC_ARCHITECTURES])


def test_a_window_on_some_layers_is_refused():
    with pytest.raises(Refusal, match="a sliding window on 4 of 16 layers; supported: on all or none"):
        model_config({**QWEN2, "use_sliding_window": True, "max_window_layers": 12})


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8]}, (7, 8)),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": None}, (3, 4)),
        ({"eos_token_id": 5}, {"eos_token_id": 0}, (0,)),
        ({}, None, ()),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(config, generation, eos):
    assert model_config({**LLAMA, **config}, generation).eos_token_ids == eos


def test_dtype_is_read_under_its_old_name_and_its_new_one():
    assert model_config({**LLAMA, "torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert model_config({**LLAMA, "dtype": "float16"}).dtype == "float16"


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("MistralForCausalLM", {"head_dim": 16}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"head_dim": 16}),
        ("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    ],
)
def test_the_expected_tensors_are_those_that_transformers_makes(architecture, changes):
    reference = reference_model(architecture, **changes)
    tensors = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    if reference.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    assert tensor_shapes(model_config(reference.config.to_dict())) == tensors


@pytest.mark.parametrize("name", ["LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config"])
def test_a_config_of_defaults_alone_is_read_as_transformers_reads_it(name):
    theirs = getattr(transformers, name)()
    ours = model_config({**theirs.to_dict(), "architectures": [name.replace("Config", "ForCausalLM")]})
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
