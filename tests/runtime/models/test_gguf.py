"""GGUF: a model written as llama.cpp writes it comes back as it was, and the demo file as transformers reads it."""

from __future__ import annotations

import json
import os

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.folders import BOS, CHAT_TEMPLATE, EOS, tokenizer
from tests.runtime.tiny import reference_model
from transformers import AutoTokenizer

from outrider_runtime.errors import Refusal
from outrider_runtime.models import gguf as gguf_module
from outrider_runtime.models.checkpoint import open_checkpoint
from outrider_runtime.models.config import model_config
from outrider_runtime.models.gguf import GGUFFile
from outrider_runtime.models.registry import make_model
from outrider_runtime.models.transfer import fill
from outrider_runtime.server.tokenizer import Tokenizer

NAMES = {
    "llama": ("LlamaForCausalLM", gguf.MODEL_ARCH.LLAMA),
    "qwen2": ("Qwen2ForCausalLM", gguf.MODEL_ARCH.QWEN2),
    "qwen3": ("Qwen3ForCausalLM", gguf.MODEL_ARCH.QWEN3),
}


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """The order of q and k in llama.cpp's own files: rotary halves interleaved."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write(path, architecture="llama", *, pre="smollm", fields=(), tensors=(), quantization=None, **changes):
    """A tiny model as a GGUF file; returns transformers' model of the same weights."""
    words = tokenizer()
    shape = {"vocab_size": len(words), "bos_token_id": 0, "eos_token_id": 1, **changes}
    reference = reference_model(NAMES[architecture][0], **shape)
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
    backend = json.loads(words.backend_tokenizer.to_str())["model"]
    vocabulary = sorted(backend["vocab"], key=backend["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if id_ < 2 else 1 for id_ in range(len(vocabulary))])
    writer.add_token_merges([" ".join(merge) for merge in backend["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for add, *arguments in fields:
        getattr(writer, add)(*arguments)
    names = gguf.get_tensor_name_map(NAMES[architecture][1], config.num_hidden_layers)
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = permuted(values, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        kind = quantization if values.ndim == 2 else None
        if kind is not None:
            values = gguf.quants.quantize(values, kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), values, raw_dtype=kind)
    for name, values in tensors:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return reference


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_a_model_comes_back_from_its_gguf_file_as_it_was(tmp_path, architecture, changes):
    reference = write(tmp_path / "tiny.gguf", architecture, **changes)
    checkpoint = open_checkpoint("m", tmp_path, tmp_path / "cache")
    expected = dict(reference.state_dict())
    if reference.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    found = dict(checkpoint.weights())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    theirs = model_config({**reference.config.to_dict(), "dtype": "float32"})
    assert checkpoint.config.eos_token_ids == (1,)
    for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "qk_norm", "attention_bias"):
        assert getattr(checkpoint.config, field) == getattr(theirs, field)


def test_quantized_tensors_are_dequantised(tmp_path):
    reference = write(tmp_path / "tiny.gguf", quantization=gguf.GGMLQuantizationType.Q8_0, intermediate_size=64)
    found = dict(open_checkpoint("m", tmp_path / "tiny.gguf", tmp_path).weights())
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(found[name], tensor, atol=0.02, rtol=0.02)


def test_a_model_is_filled_from_its_file_in_the_dtype_asked_for(tmp_path):
    reference = write(tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint("m", tmp_path / "tiny.gguf", tmp_path)
    shards = make_model(checkpoint.config, torch.bfloat16, "cpu").shards()
    fill(shards, checkpoint.weights(), "m", lambda line: None)
    expected = reference.state_dict()
    assert shards.keys() == expected.keys()
    assert all(torch.equal(shards[name], expected[name].bfloat16()) for name in shards)


def test_the_tokenizer_comes_from_the_file_too_and_is_unpacked_once(tmp_path):
    write(tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint("m", tmp_path / "tiny.gguf", tmp_path / "cache")
    unpacked = AutoTokenizer.from_pretrained(checkpoint.tokenizer)
    text = "the outrider rode ahead"
    assert unpacked(text)["input_ids"] == tokenizer()(text)["input_ids"]
    assert unpacked.eos_token == EOS
    assert unpacked.chat_template == CHAT_TEMPLATE
    written = (checkpoint.tokenizer / "tokenizer.json").stat().st_mtime_ns
    again = open_checkpoint("m", tmp_path / "tiny.gguf", tmp_path / "cache")
    assert again.tokenizer == checkpoint.tokenizer
    assert (again.tokenizer / "tokenizer.json").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"fields": [("add_eos_token_id", 0)]}, {"eos_token": BOS}),
        ({"fields": [("add_bos_token_id", 1)]}, {"bos_token": EOS}),
        ({"fields": [("add_chat_template", CHAT_TEMPLATE.upper())]}, {"chat_template": CHAT_TEMPLATE.upper()}),
    ],
    ids=["end token", "first token", "chat template"],
)
def test_another_file_in_the_same_place_has_its_own_tokenizer(tmp_path, change, told):
    """Of the same size and time too, as from images and archives whose files all have one time."""
    file, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write(file)
    os.utime(file, (0, 0))
    before, size = open_checkpoint("m", file, cache).tokenizer, file.stat().st_size
    write(file, **change)
    os.utime(file, (0, 0))
    assert file.stat().st_size == size
    after = open_checkpoint("m", file, cache).tokenizer
    assert after != before
    unpacked = AutoTokenizer.from_pretrained(after)
    assert {name: getattr(unpacked, name) for name in told} == told


@pytest.mark.parametrize(("name", "other"), [("UNPACKED", 0), ("version", lambda package: "0")])
def test_a_tokenizer_that_other_code_unpacked_is_unpacked_again(tmp_path, monkeypatch, name, other):
    write(tmp_path / "tiny.gguf")
    with monkeypatch.context() as older:
        older.setattr(gguf_module, name, other)
        before = open_checkpoint("m", tmp_path, tmp_path / "cache").tokenizer
    assert open_checkpoint("m", tmp_path, tmp_path / "cache").tokenizer != before


def test_a_file_that_was_moved_or_touched_is_not_unpacked_again(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "tiny.gguf")
    before = open_checkpoint("m", tmp_path / "tiny.gguf", tmp_path / "cache").tokenizer
    (tmp_path / "tiny.gguf").rename(tmp_path / "elsewhere" / "tiny.gguf")
    os.utime(tmp_path / "elsewhere" / "tiny.gguf", (0, 0))
    assert open_checkpoint("m", tmp_path / "elsewhere", tmp_path / "cache").tokenizer == before


def llama3_table(factor: float, dims: int = 4, theta: float = 10000.0, context: int = 8192) -> np.ndarray:
    """As llama.cpp's converter computes it: what each rotary frequency is divided by."""
    table = []
    for frequency in 1.0 / theta ** (np.arange(dims) / dims):
        wavelength = 2 * np.pi / frequency
        if wavelength < context / 4.0:
            table.append(1.0)
        elif wavelength > context / 1.0:
            table.append(factor)
        else:
            smooth = (context / wavelength - 1.0) / (4.0 - 1.0)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_table(tmp_path, factor):
    table = llama3_table(factor, theta=500000.0)
    assert len(set(table.tolist())) > 1
    write(
        tmp_path / "tiny.gguf",
        tensors=[("rope_freqs.weight", table)],
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    )
    scaling = model_config(GGUFFile(tmp_path / "tiny.gguf").config).rope_scaling
    assert scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_linear_scaling_is_read_from_the_header(tmp_path):
    fields = [
        ("add_rope_scaling_type", gguf.RopeScalingType.LINEAR),
        ("add_rope_scaling_factor", 4.0),
    ]
    write(tmp_path / "tiny.gguf", fields=fields)
    assert model_config(GGUFFile(tmp_path / "tiny.gguf").config).rope_scaling == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fields": [("add_expert_count", 8)]}, "a mixture of experts"),
        ({"fields": [("add_uint16", "split.count", 3)]}, "one of 3 parts; join them with llama-gguf-split --merge"),
        ({"tensors": [("blk.0.ssm_a.weight", np.zeros(4, np.float32))]}, "tensor blk.0.ssm_a.weight, which no"),
        ({"tensors": [("rope_freqs.weight", np.full(4, 3, np.float32))]}, "a rope_freqs table of unknown origin"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, options, told):
    write(tmp_path / "tiny.gguf", **options)
    with pytest.raises(Refusal) as refusal:
        GGUFFile(tmp_path / "tiny.gguf")
    assert refusal.value.reason == "UnsupportedModel"
    assert told in refusal.value.message


def test_another_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(Refusal, match="architecture mamba; supported: llama, qwen2, qwen3"):
        GGUFFile(tmp_path / "mamba.gguf")


def test_a_file_of_a_vocabulary_alone_is_refused(tmp_path):
    """As llama.cpp's own tests have them."""
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(Refusal, match=r"vocabulary\.gguf: no weights, or not all: token_embd\.weight is missing"):
        GGUFFile(tmp_path / "vocabulary.gguf")


def test_a_tokenizer_that_transformers_cannot_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda *arguments: None)
    write(tmp_path / "tiny.gguf")
    with pytest.raises(Refusal, match=r"tiny\.gguf: its tokenizer cannot be read \(KeyError"):
        open_checkpoint("m", tmp_path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("pre", "fields", "begins"),
    [
        ("llama-bpe", [], True),  # Llama 3, converted before llama.cpp wrote whether texts begin with BOS
        ("llama-bpe", [("add_add_bos_token", False)], False),
        ("llama-bpe", [("add_add_bos_token", True)], True),
        ("smollm", [], False),
        ("smollm", [("add_add_bos_token", True)], True),
    ],
)
def test_a_text_begins_as_it_does_in_llama_cpp(tmp_path, pre, fields, begins):
    write(tmp_path / "tiny.gguf", pre=pre, fields=fields)
    ours = Tokenizer(open_checkpoint("m", tmp_path, tmp_path / "cache").tokenizer)
    plain = tuple(tokenizer()("the outrider")["input_ids"])
    assert ours.encode("the outrider", add_special_tokens=True) == ((0, *plain) if begins else plain)
    assert ours.encode("the outrider", add_special_tokens=False) == plain


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1])
def test_a_torn_file_is_refused_by_name(tmp_path, keep):
    write(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "torn.gguf").write_bytes(whole[:keep])
    with pytest.raises(Refusal) as refusal:
        GGUFFile(tmp_path / "torn.gguf")
    assert refusal.value.reason == "ModelNotFound"
    assert "torn.gguf is no whole GGUF file" in refusal.value.message


def test_a_file_whose_download_left_its_end_for_later_is_refused_by_name(tmp_path):
    write(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole[:500] + bytes(len(whole) - 500))
    with pytest.raises(Refusal, match=r"tiny\.gguf is no whole GGUF file .*; copy or download the model again"):
        GGUFFile(tmp_path / "tiny.gguf")


def test_a_pointer_of_git_lfs_is_refused_as_one(tmp_path):
    (tmp_path / "tiny.gguf").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")
    with pytest.raises(Refusal, match=r"tiny\.gguf is a pointer of Git LFS, not the weights; run git lfs pull"):
        open_checkpoint("m", tmp_path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("missing", "key"), [("add_embedding_length", "embedding_length"), ("add_head_count", "attention.head_count")]
)
def test_a_header_without_a_size_is_refused_by_its_name(tmp_path, monkeypatch, missing, key):
    monkeypatch.setattr(gguf.GGUFWriter, missing, lambda *arguments: None)
    write(tmp_path / "tiny.gguf")
    with pytest.raises(Refusal, match=rf"tiny\.gguf: llama\.{key} is None; it must be a positive integer"):
        GGUFFile(tmp_path / "tiny.gguf")


def test_of_several_files_in_a_folder_one_must_be_named(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(Refusal, match="2 GGUF files in the folder; name one of them"):
        open_checkpoint("m", tmp_path, tmp_path)


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "llama", "architectures": ["Llama"]}])
def test_a_config_json_beside_the_file_changes_nothing(tmp_path, config):
    write(tmp_path / "tiny.gguf")
    alone = open_checkpoint("m", tmp_path, tmp_path / "cache")
    (tmp_path / "config.json").write_text(json.dumps(config))
    beside = open_checkpoint("m", tmp_path, tmp_path / "another cache")
    assert (beside.config, beside.vocabulary()) == (alone.config, alone.vocabulary())
    assert dict(beside.weights()).keys() == alone.weights().shapes.keys()


@pytest.mark.model
def test_the_demo_file_reads_as_transformers_converted_it(demo_models):
    found = GGUFFile(demo_models / "smollm2-135m-instruct-gguf" / "smollm2-135m-instruct-q4_1.gguf")
    converted = load_file(demo_models / "smollm2-135m-instruct" / "model.safetensors")
    tensors = dict(found)
    assert tensors.keys() == converted.keys()
    assert all(torch.equal(tensors[name], converted[name]) for name in tensors)
    theirs = json.loads((demo_models / "smollm2-135m-instruct" / "config.json").read_text())
    assert model_config(found.config) == model_config(theirs)
