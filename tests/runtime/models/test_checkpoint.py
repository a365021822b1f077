"""Checkpoints on disk: every format gives the same tensors, and a torn one is refused by the file's name."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.folders import make_model

from outrider_runtime.errors import Refusal
from outrider_runtime.models.checkpoint import open_checkpoint


@pytest.fixture
def folder(tiny_model_dir, tmp_path):
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    folder = make_model(tmp_path / "sharded", shard_size="20kB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def read(folder):
    return dict(open_checkpoint("m", folder, folder / "cache").weights())


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def refusal(folder):
    with pytest.raises(Refusal) as caught:
        read(folder)
    assert "\n" not in caught.value.message
    return caught.value.reason, caught.value.message


def to_bin(folder, **options):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", **options)


def test_shards_hold_what_a_single_file_holds(sharded, tiny_model_dir):
    assert same(read(sharded), read(tiny_model_dir))


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "before torch 1.6"])
def test_bin_files_hold_what_safetensors_hold(folder, tiny_model_dir, options):
    to_bin(folder, **options)
    assert same(read(folder), read(tiny_model_dir))


def test_sharded_bin_files_are_read_by_their_index(folder, tiny_model_dir):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"pytorch_model-{1 + i % 2:05}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert same(read(folder), read(tiny_model_dir))


def test_a_bin_file_that_runs_code_is_refused_unrun(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (folder / "model.safetensors").unlink()
    torch.save({"w": Evil()}, folder / "pytorch_model.bin")
    reason, message = refusal(folder)
    assert (reason, "pytorch_model.bin holds something other than tensors" in message) == ("ModelNotFound", True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_file_is_refused_by_name_and_size(folder, size):
    file = folder / "model.safetensors"
    whole = file.stat().st_size
    os.truncate(file, size if size >= 0 else whole - 1)
    reason, message = refusal(folder)
    assert reason == "ModelNotFound"
    assert message.startswith(f"{file} is truncated: {size if size >= 0 else whole - 1} bytes")
    assert message.endswith("copy or download the model again")


def test_a_file_of_something_else_is_refused(folder):
    (folder / "model.safetensors").write_bytes((10).to_bytes(8, "little") + b"<html></ht" + b"x" * 50)
    assert refusal(folder) == (
        "ModelNotFound",
        f"{folder / 'model.safetensors'} has no safetensors header; copy or download the model again",
    )


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_refused_as_one(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 988097824\n")
    assert refusal(folder) == (
        "ModelNotFound",
        f"{folder / name} is a pointer of Git LFS, not the weights; run git lfs pull where it lies",
    )


@pytest.mark.parametrize("zipped", [True, False])  # as torch writes since 1.6, and before
@pytest.mark.parametrize("size", [0, 18, 28, 500, 3000, 30_000])
def test_a_truncated_bin_file_is_refused(folder, zipped, size):
    to_bin(folder, _use_new_zipfile_serialization=zipped)
    os.truncate(folder / "pytorch_model.bin", size)
    reason, message = refusal(folder)
    assert reason == "ModelNotFound"
    assert "pytorch_model.bin holds something other than tensors, or is truncated" in message


def test_a_page_in_a_bin_files_place_is_refused_without_torchs_advice_to_load_it_all_the_same(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_text("<!DOCTYPE html><html>")
    assert refusal(folder) == (
        "ModelNotFound",
        f"{folder / 'pytorch_model.bin'} holds something other than tensors, or is truncated (UnpicklingError); "
        "copy or download the model again",
    )


def test_a_bin_file_of_tensors_without_names_is_refused(folder):
    (folder / "model.safetensors").unlink()
    torch.save({0: torch.zeros(2)}, folder / "pytorch_model.bin")
    assert refusal(folder) == (
        "UnsupportedModel",
        f"{folder / 'pytorch_model.bin'} is not a dictionary of tensors by name; give safetensors",
    )


def test_a_missing_shard_is_refused_by_name(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    assert refusal(sharded) == (
        "ModelNotFound",
        f"{gone} is missing, and model.safetensors.index.json names it; copy or download the model again",
    )


@pytest.mark.parametrize("format", ["model.safetensors", "pytorch_model.bin"])
def test_the_index_of_shards_that_were_joined_is_not_asked(folder, tiny_model_dir, format):
    if format == "pytorch_model.bin":
        to_bin(folder)
    stem, suffix = format.split(".")
    stale = {"weight_map": {"model.norm.weight": f"{stem}-00001-of-00002.{suffix}"}}
    (folder / f"{format}.index.json").write_text(json.dumps(stale))
    assert same(read(folder), read(tiny_model_dir))


def test_shards_without_their_index_are_refused(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json is missing, though there are shards" in refusal(sharded)[1]


def test_a_shard_without_a_tensor_of_the_index_is_refused(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, shard)
    assert f"{shard} lacks {lost}, which the index says it holds" in refusal(sharded)[1]


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}'])
def test_an_index_that_is_none_is_refused(sharded, text):
    index = sharded / "model.safetensors.index.json"
    index.write_text(text)
    assert str(index) in refusal(sharded)[1]


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", "no model.safetensors, pytorch_model.bin or .gguf in the folder"),
    ],
)
def test_a_missing_file_is_named(folder, file, told):
    (folder / file).unlink()
    reason, message = refusal(folder)
    assert reason == "ModelNotFound"
    assert told in message


@pytest.mark.parametrize(("text", "told"), [("{", "is not JSON"), ("[]", "is not a JSON object")])
def test_a_config_that_is_none_is_refused(folder, text, told):
    (folder / "config.json").write_text(text)
    assert f"config.json {told}" in refusal(folder)[1]


@pytest.mark.parametrize(("text", "told"), [(None, "is missing"), ("{}", "is not a tokenizer")])
def test_a_missing_or_torn_tokenizer_is_refused(folder, text, told):
    (folder / "tokenizer.json").unlink()
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    with pytest.raises(Refusal, match=f"tokenizer.json {told}"):
        open_checkpoint("m", folder, folder).vocabulary()


@pytest.mark.parametrize(
    ("edit", "reason", "told"),
    [
        (lambda t: t.pop("model.norm.weight"), "ModelNotFound", "1 tensors are missing, model.norm.weight first"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(5)}),
            "UnsupportedModel",
            "model.norm.weight has shape [5], config.json asks for [32]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            "UnsupportedModel",
            "1 tensors that its architecture does not have, model.layers.0.self_attn.q_proj.bias first",
        ),
    ],
    ids=["missing", "another shape", "unknown"],
)
def test_tensors_that_do_not_fit_the_config_are_refused_before_they_are_read(folder, edit, reason, told):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    found, message = refusal(folder)
    assert found == reason
    assert told in message


@pytest.mark.parametrize("added", ["qweight", "weight_scale"])
def test_a_quantized_checkpoint_whose_config_does_not_say_so_is_refused_as_what_it_is(folder, added):
    tensors, layer = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.q_proj"
    weight = tensors.pop(f"{layer}.weight")
    if added == "weight_scale":
        tensors[f"{layer}.weight"] = weight.to(torch.int8)
    save_file({**tensors, f"{layer}.{added}": torch.zeros(4)}, folder / "model.safetensors")
    reason, message = refusal(folder)
    assert reason == "UnsupportedModel"
    assert f"the checkpoint is quantized, {layer}.{added} says; give one in bfloat16" in message


def test_tables_that_old_versions_saved_are_ignored(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, folder / "model.safetensors")
    assert read(folder).keys() > tensors.keys()
