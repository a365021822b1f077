"""Heads as they are published, read as they are; and each that does not fit its target is refused by what differs."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.batches import Span, make_batch
from tests.runtime.folders import make_model
from tests.runtime.heads import (
    HEAD,
    HIDDEN,
    TAPPED,
    eagle_head,
    eagle_tensors,
    medusa_heads,
    medusa_tensors,
    write_head,
)
from tests.runtime.tiny import VOCAB, tiny_pair
from torch.nn import functional as F

from outrider_runtime.check import run_check
from outrider_runtime.config import CacheConfig, EngineConfig, SourceConfig, SpeculationConfig
from outrider_runtime.errors import Refusal
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.models.config import ModelConfig
from outrider_runtime.models.loader import load
from outrider_runtime.models.preflight import preflight

SPECULATORS = {
    "speculators_model_type": "eagle3",
    "draft_vocab_size": VOCAB - 20,
    "norm_before_fc": True,
    "norm_output": True,
    "transformer_layer_config": {**HEAD, "model_type": "llama"},
}


def target() -> ModelConfig:
    return tiny_pair()[1].config


def rename(made, old, new):
    return {name.replace(old, new): tensor for name, tensor in made.items()}


@pytest.mark.parametrize(
    ("made", "config", "said"),
    [
        (eagle_tensors(3), {}, {"tapped": (0, 1, 2), "head_rows": VOCAB - 20, "mapped": True, "own_embedding": False}),
        (rename(eagle_tensors(3), "midlayer", "layers.0"), {}, {"first_layer": "layers.0"}),
        (
            eagle_tensors(3, input_norm__weight=(3 * HIDDEN,)),
            SPECULATORS,
            {"norm_before_residual": True, "norm_output": True, "input_norm": True},
        ),
        (
            eagle_tensors(3, **{f"aux_norm_{each}__weight": (HIDDEN,) for each in ("low", "mid", "high")}),
            {"norm_before_residual": True},
            {"tap_norms": ("aux_norm_low", "aux_norm_mid", "aux_norm_high"), "norm_before_residual": True},
        ),
        (
            eagle_tensors(3, embed_tokens__weight=(VOCAB, HIDDEN), midlayer__self_attn__q_proj__bias=(HIDDEN,))
            | {f"midlayer.self_attn.{each}_proj.bias": torch.ones(HIDDEN // 2) for each in "kv"},
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}},
            {"own_embedding": True, "tapped": (1, 1, 2)},
        ),
    ],
    ids=["as published", "other name", "speculators", "norms of taps", "biases and embedding"],
)
def test_an_eagle_3_head_is_read_as_it_is(made, config, said):
    shape = eagle_head(3, target(), made, **config).shape
    assert {name: getattr(shape, name) for name in said} == said


@pytest.mark.parametrize("bias", [True, False])
def test_an_eagle_1_head_has_neither_norms_nor_head(bias):
    made = eagle_tensors(1)
    if not bias:
        del made["fc.bias"]
    head = eagle_head(1, target(), made)
    assert (head.shape.fc_bias, head.norm, head.head, head.shape.tapped) == (bias, None, None, ())
    assert head.embedding is not None


@pytest.mark.parametrize("blocks", [1, 2])
def test_medusa_heads_are_counted(blocks):
    heads = medusa_heads(target(), medusa_tensors(5, blocks))
    assert (heads.shape.heads, heads.shape.blocks) == (5, blocks)


@pytest.mark.parametrize("config", [{}, SPECULATORS], ids=["raw", "speculators"])
def test_what_an_eagle_3_head_computes_is_its_definition(config):
    """Over a whole text, in plain torch; entries of one text lie in shuffled blocks, in two chunks."""
    made = eagle_tensors(3, input_norm__weight=(3 * HIDDEN,))
    head = eagle_head(3, target(), made, **config)
    model = tiny_pair()[1]
    head.attach(model, 64)
    text, blocks = torch.randint(VOCAB, (13,)).tolist(), [3, 0, 4, 1, 2]
    model(
        make_batch([Span(text[:-1], 0, [0, 1, 2, 3])], 4, "cpu", model.attention_shape),
        KVCache(model.config, 4, 4, torch.float32, "cpu"),
    )
    states = head.states(torch.zeros(12, HIDDEN))
    cache = KVCache(head.config, 5, 4, torch.float32, "cpu")
    parts = []
    for start, end in ((0, 7), (7, 12)):
        batch = make_batch([Span(text[start + 1 : end + 1], start + 1, blocks)], 4, "cpu", head.attention_shape)
        parts.append(head(batch, states[start:end].clone(), cache))
    found = torch.cat(parts)

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], made[f"{name}.weight"], 1e-5)

    taps = model.taps[:12]
    fused = norm(taps, "input_norm") @ made["fc.weight"].T
    pairs = torch.cat(
        (norm(model.embedding.weight[text[1:]], "midlayer.input_layernorm"), norm(fused, "midlayer.hidden_norm")), 1
    )
    q, k, v = (pairs @ made[f"midlayer.self_attn.{each}_proj.weight"].T for each in "qkv")
    q, k, v = (each.view(12, -1, 8).transpose(0, 1) for each in (q, k, v))
    angles = torch.arange(1, 13).unsqueeze(1) / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    cosine, sine = angles.cos(), angles.sin()

    def turn(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)

    attended = F.scaled_dot_product_attention(
        turn(q), turn(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True
    )
    residual = pairs[:, HIDDEN:] if head.shape.norm_before_residual else fused
    hidden = residual + attended.transpose(0, 1).reshape(12, -1) @ made["midlayer.self_attn.o_proj.weight"].T
    inner = norm(hidden, "midlayer.post_attention_layernorm")
    gate, up = (inner @ made[f"midlayer.mlp.{each}_proj.weight"].T for each in ("gate", "up"))
    hidden = hidden + (F.silu(gate) * up) @ made["midlayer.mlp.down_proj.weight"].T
    expected = norm(hidden, "norm") if head.shape.norm_output else hidden
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        head.logits(found), norm(hidden, "norm") @ made["lm_head.weight"].T, rtol=1e-4, atol=1e-4
    )


def without(made, *names):
    return {name: tensor for name, tensor in made.items() if name not in names}


@pytest.mark.parametrize(
    ("version", "made", "config", "told"),
    [
        (3, eagle_tensors(1), {}, "no hidden_norm.weight: it is no EAGLE-3 head; use the method eagle"),
        (1, eagle_tensors(3), {}, "hidden_norm.weight makes it an EAGLE-3 head; use the method eagle3"),
        (3, without(eagle_tensors(3), "fc.weight"), {}, "fc.weight is missing"),
        (
            3,
            eagle_tensors(3) | {"fc.weight": torch.zeros(HIDDEN, 96 * 2)},
            {},
            "fc.weight takes 192 inputs, the target's 3 tapped layers give 3 x 32; give the head that was trained for",
        ),
        (
            3,
            eagle_tensors(3),
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 30]},
            "it reads layer 30 of a target that has 2",
        ),
        (3, eagle_tensors(3), {"eagle_aux_hidden_state_layer_ids": None}, "it reads layer -1 of a target that has 2"),
        (1, eagle_tensors(1), {"hidden_size": 64}, "fc.weight takes 64 inputs, not 2 x hidden_size 64"),
        (
            1,
            eagle_tensors(1) | {"fc.weight": torch.zeros(64, 128)},
            {"hidden_size": 64},
            "its hidden_size is 64, the target's 32",
        ),
        (
            3,
            eagle_tensors(3) | {"lm_head.weight": torch.zeros(99, HIDDEN)},
            {},
            "has 99 rows, the target's vocabulary 61",
        ),
        (3, without(eagle_tensors(3), "lm_head.weight"), {}, "d2t maps the rows of lm_head.weight, which is missing"),
        (3, eagle_tensors(3, mask_hidden=(1, 96)), {}, "mask_hidden makes it a P-EAGLE head"),
        (3, eagle_tensors(3), {"speculators_model_type": "dflash"}, "speculators_model_type dflash; supported: eagle3"),
        (3, eagle_tensors(3), {"quantization_config": {"quant_method": "fp8"}}, "quantized by fp8"),
        (3, eagle_tensors(3), {"quantization": "fp8"}, "quantized by fp8"),
        (3, eagle_tensors(3), {"quantization_config": "fp8"}, "quantized by fp8"),
        (3, eagle_tensors(3), {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic; supported"),
        (
            3,
            eagle_tensors(3),
            {"eagle_config": "eagle3"},
            "eagle_config is 'eagle3' in config.json; it must be an object",
        ),
        (
            3,
            eagle_tensors(3),
            {"eagle_aux_hidden_state_layer_ids": "0,1,2"},
            "eagle_aux_hidden_state_layer_ids is '0,1,2' in config.json; it must be a list of layers",
        ),
        (3, eagle_tensors(3), {"eagle_aux_hidden_state_layer_ids": [0, 1, None]}, "is [0, 1, None] in config.json"),
    ],
)
def test_a_head_that_does_not_fit_says_what_differs(version, made, config, told):
    with pytest.raises(Refusal) as refusal:
        eagle_head(version, target(), made, **config)
    assert refusal.value.reason == "UnsupportedModel"
    assert told in refusal.value.message


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN)}, "no 0.1.weight: these are no Medusa heads"),
        ({"encoder.0.1.weight": torch.zeros(HIDDEN)}, "no 0.1.weight: these are no Medusa heads"),
        ({"0.1.weight": torch.zeros(VOCAB, 64)}, "0.1.weight is [61, 64], and the target's hidden size is 32, not 64"),
    ],
)
def test_medusa_heads_that_do_not_fit_say_what_differs(made, told):
    with pytest.raises(Refusal) as refusal:
        medusa_heads(target(), made)
    assert told in refusal.value.message


def config(target_dir, head, method, **changes):
    speculation = SpeculationConfig(method, SourceConfig(str(head)))
    return EngineConfig(SourceConfig(str(target_dir)), speculation, cache=CacheConfig(num_blocks=8), **changes)


def quiet(line):
    pass


@pytest.fixture(scope="module")
def small_target_dir(tmp_path_factory):
    """Of the heads' own vocabulary, which its tokenizer has more tokens than."""
    return make_model(tmp_path_factory.mktemp("target") / "target")


def wide(made, rows):
    """Of so many tokens, where they were of VOCAB."""
    sized = {name: tensor.new_zeros(rows, *tensor.shape[1:]) for name, tensor in made.items() if len(tensor) == VOCAB}
    return made | sized


def test_a_head_is_loaded_with_its_weights_and_counted_in_the_memory_plan(small_target_dir, tmp_path):
    made = eagle_tensors(3)
    head = write_head(tmp_path / "head", made, {**HEAD, **TAPPED})
    lines = []
    found = load(config(small_target_dir, head, "eagle3"), lines.append)
    assert found.draft_state.ok
    for name, place in found.draft.module.shards().items():
        assert torch.equal(place, made[name])
    assert any(line.startswith("draft: EAGLE-3 head, reads layers 0, 1, 2, drafts 41 tokens, 0.0 M") for line in lines)
    assert found.draft_state.message.startswith("draft: trained on 64 tokens of the target's 128; further on it drafts")
    with_head = preflight(config(small_target_dir, head, "eagle3"), quiet, quiet).plan
    alone = preflight(config(small_target_dir, "", "ngram"), quiet, quiet).plan
    weights = sum(tensor.numel() for name, tensor in made.items() if name != "t2d")
    assert with_head.draft_weights == 4 * weights
    assert with_head.block - alone.block == 16 * 2 * (HIDDEN // 2) * 4
    assert with_head.workspace > alone.workspace + 3 * HIDDEN * 4 * 2048


def test_medusa_heads_are_loaded_from_their_own_file(small_target_dir, tmp_path):
    rows = load(config(small_target_dir, "", "ngram"), quiet).vocab_size
    made = wide(medusa_tensors(), rows)
    head = write_head(tmp_path / "head", made, {"medusa_num_heads": 2}, name="medusa_lm_head")
    found = load(config(small_target_dir, head, "medusa"), quiet)
    assert found.draft_state.ok
    assert found.draft.module.shape.heads == 4
    torch.save({name: tensor + 1 for name, tensor in made.items()}, head / "medusa_lm_head.pt")
    (head / "medusa_lm_head.safetensors").unlink()
    found = load(config(small_target_dir, head, "medusa"), quiet)
    assert torch.equal(found.draft.module.shards()["0.0.linear.bias"], made["0.0.linear.bias"] + 1)


def medusa_2(folder, made=None, **changes):
    """As Medusa-2 is published: a whole model fine-tuned together with heads, one checkpoint of both."""
    make_model(folder, **changes)
    tensors = load_file(folder / "model.safetensors")
    made = wide(medusa_tensors() if made is None else made, len(tensors["lm_head.weight"]))
    save_file(tensors | {f"medusa_head.{name}": each for name, each in made.items()}, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"medusa_num_heads": 4, "medusa_num_layers": 1}))
    return folder


def test_medusa_heads_inside_a_whole_model_draft_for_it(tmp_path):
    whole = medusa_2(tmp_path / "whole")
    tensors, lines = load_file(whole / "model.safetensors"), []
    found = load(config(whole, whole, "medusa"), lines.append)
    assert (found.draft_state.ok, found.draft_state.message) == (True, "")
    shards = found.target.module.shards() | found.draft.module.shards()
    assert shards.keys() == tensors.keys()
    assert all(torch.equal(shards[name], tensors[name]) for name in tensors)
    assert any(line.startswith("draft: 4 Medusa heads of 1 residual blocks, inside a whole model, ") for line in lines)
    heads = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("medusa_head."))
    assert found.draft.loaded.parameters == heads


def test_medusa_heads_inside_a_whole_model_draft_for_what_may_be_its_copy_and_it_is_said(small_target_dir, tmp_path):
    whole = medusa_2(tmp_path / "whole")
    found = load(config(small_target_dir, whole, "medusa"), quiet)
    assert found.draft_state.ok
    assert found.draft_state.message == (
        f"draft: its heads were trained together with the whole model {whole} that they lie in; give that as the "
        f"target, too, unless {small_target_dir} is a copy of it: for another model fewer of their tokens may be "
        "accepted"
    )


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is [32] in it and none in the target"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight is none in it and [32] in the target"),
        ({"intermediate_size": 40}, "model.layers.0.mlp.down_proj.weight is [32, 40] in it and [32, 48] in the target"),
    ],
)
def test_medusa_heads_inside_another_whole_model_are_refused_as_what_they_are(
    small_target_dir, tmp_path, changes, differs
):
    whole = medusa_2(tmp_path / "whole", **changes)
    state = load(config(small_target_dir, whole, "medusa"), quiet).draft_state
    assert (state.ok, state.reason) == (False, "UnsupportedModel")
    assert state.message == (
        f"{whole}: a whole model with 4 Medusa heads inside, and another than the target: {differs}; the heads draft "
        f"for that model alone, give {whole} as the target, too"
    )


def test_medusa_heads_inside_a_whole_model_must_be_whole_themselves(tmp_path):
    whole = medusa_2(tmp_path / "whole", medusa_tensors() | {"0.1.bias": torch.zeros(VOCAB)})
    state = load(config(whole, whole, "medusa"), quiet).draft_state
    assert "1 tensors that its architecture does not have, medusa_head.0.1.bias first" in state.message


def test_a_whole_model_with_medusa_heads_given_as_a_draft_model_is_refused_by_what_it_is(small_target_dir, tmp_path):
    whole = medusa_2(tmp_path / "whole")
    state = preflight(config(small_target_dir, whole, "draft-model"), quiet, quiet).draft_state
    assert (state.ok, state.reason) == (False, "UnsupportedModel")
    assert state.message == (
        f"{whole}: it is a whole model with heads inside, which draft for that model; use the method medusa and give "
        f"{whole} as the target, too"
    )


@pytest.mark.parametrize(("by", "told"), [(7, ""), (-7, "knows {} tokens, the tokenizer of target")])
def test_medusa_heads_may_be_padded_further_but_know_the_tokenizers_tokens(small_target_dir, tmp_path, by, told):
    rows = load(config(small_target_dir, "", "ngram"), quiet).vocab_size + by
    head = write_head(tmp_path / "head", wide(medusa_tensors(), rows), {}, name="medusa_lm_head")
    found = load(config(small_target_dir, head, "medusa"), quiet)
    assert found.draft_state.ok == (not told)
    assert told.format(rows) in found.draft_state.message


@pytest.mark.parametrize(
    ("version", "made", "said"),
    [
        (3, eagle_tensors(3) | {"norm.weight": torch.ones(8)}, "norm.weight has shape [8], config.json asks for [32]"),
        (3, eagle_tensors(3, extra__weight=(3,)), "1 tensors that its architecture does not have, extra.weight first"),
        (1, eagle_tensors(1), "knows 61 tokens, the tokenizer of target"),
        (
            3,
            eagle_tensors(3) | {"d2t": torch.full((VOCAB - 20,), 300)},
            "d2t maps a row of the draft's head to token 300",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_and_the_target_served(small_target_dir, tmp_path, version, made, said):
    head = write_head(tmp_path / "head", made, {**HEAD, **TAPPED})
    found = load(config(small_target_dir, head, "eagle3" if version == 3 else "eagle"), quiet)
    assert found.draft is None
    assert said in found.draft_state.message


@pytest.mark.parametrize(
    ("made", "said", "name", "method"),
    [
        (eagle_tensors(1), HEAD, "model", "eagle"),
        (eagle_tensors(3), {**HEAD, "draft_vocab_size": VOCAB - 20}, "model", "eagle3"),
        (eagle_tensors(3), {**HEAD, "architectures": ["LlamaForCausalLMEagle3"]}, "model", "eagle3"),
        (eagle_tensors(3), {**SPECULATORS, "architectures": ["Eagle3Speculator"]}, "model", "eagle3"),
        (medusa_tensors(), {"medusa_num_heads": 2}, "medusa_lm_head", "medusa"),
    ],
    ids=["EAGLE-1", "EAGLE-3", "EAGLE-3 as SGLang names it", "speculators", "Medusa"],
)
def test_a_head_given_as_a_draft_model_is_refused_by_its_own_method(
    small_target_dir, tmp_path, made, said, name, method
):
    head = write_head(tmp_path / "head", made, said, name=name)
    state = preflight(config(small_target_dir, head, "draft-model"), quiet, quiet).draft_state
    assert (state.ok, state.reason) == (False, "UnsupportedModel")
    assert state.message == f"{head}: it is a head, not a model of its own; use the method {method}"


def test_an_eagle_head_does_not_draft_for_a_model_that_cannot_be_looked_into(tmp_path):
    other = make_model(tmp_path / "target", architecture="Olmo2ForCausalLM")
    head = write_head(tmp_path / "head", eagle_tensors(3), {**HEAD, **TAPPED})
    lines = []
    assert run_check(config(other, head, "eagle3"), lines.append) == 65
    assert "Olmo2ForCausalLM runs by transformers' code, which an EAGLE head cannot look into" in lines[-1]
