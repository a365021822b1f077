"""Our logits are transformers' logits, however a text is cut into steps and mixed with others."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.tiny import VOCAB, ours, reference_model, tiny_pair

from outrider_runtime.errors import Refusal
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.batch import Span, make_batch
from outrider_runtime.models.config import model_config
from outrider_runtime.models.llama import LlamaForCausalLM

BLOCK = 4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, tied embeddings": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, biases everywhere": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head, wide heads": ("LlamaForCausalLM", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama, llama3 rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama, linear rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    ),
    "llama, yarn rope": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral, sliding window": ("MistralForCausalLM", {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
}


def in_steps(model: LlamaForCausalLM, texts: list[list[int]], cuts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of each text, computed over steps: `cuts[i]` are the lengths of text i's chunks."""
    width = max(-(-len(text) // BLOCK) for text in texts)
    order = torch.randperm(len(texts) * width, generator=torch.Generator().manual_seed(1)).tolist()
    blocks = [order[i * width : (i + 1) * width] for i in range(len(texts))]
    cache = KVCache(model.config, len(order), BLOCK, model.dtype, "cpu")
    done = [0] * len(texts)
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in range(max(map(len, cuts))):
        members = [i for i in range(len(texts)) if step < len(cuts[i])]
        spans = [Span(texts[i][done[i] : done[i] + cuts[i][step]], done[i], blocks[i]) for i in members]
        batch = make_batch(spans, BLOCK, "cpu", model.attention_shape)
        logits = model.logits(model(batch, cache)).split([len(span.token_ids) for span in spans])
        for i, span, part in zip(members, spans, logits, strict=True):
            parts[i].append(part)
            done[i] = span.end
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant):
    architecture, changes = VARIANTS[variant]
    reference = reference_model(architecture, **changes)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (19, 1, 200)]
    computed = in_steps(ours(reference), texts, [[19], [1], [200]])
    for text, logits in zip(texts, computed, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", [None, 6])
def test_chunks_and_neighbours_do_not_change_logits(window):
    model = ours(reference_model("MistralForCausalLM", sliding_window=window))
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (150, 9, 30, 6)]
    whole = [in_steps(model, [text], [[len(text)]])[0] for text in texts]
    chunked = in_steps(model, texts, [[100, 1, 1, 3, 45], [9], [7, 1, 1, 1, 20], [1] * 6])
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


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
