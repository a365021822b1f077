"""Weights come from files into a model's tensors whole, in its dtype, and without a second copy of them in memory."""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.folders import make_model

from outrider_runtime.errors import Refusal
from outrider_runtime.models import transfer
from outrider_runtime.models.checkpoint import open_checkpoint
from outrider_runtime.models.registry import make_model as make_module
from outrider_runtime.models.weights import SafetensorsWeights


@pytest.fixture
def folder(tiny_model_dir, tmp_path):
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def filled(folder, dtype=torch.float32, report=lambda line: None):
    checkpoint = open_checkpoint("m", folder, folder / "cache")
    shards = make_module(checkpoint.config, dtype, "cpu").shards()
    for shard in shards.values():
        shard.fill_(torch.nan)
    transfer.fill(shards, checkpoint.weights(), checkpoint.name, report)
    return shards


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def test_weights_are_those_of_the_file_in_however_many_pieces(folder, monkeypatch):
    tensors = load_file(folder / "model.safetensors")
    assert same(filled(folder), tensors)
    monkeypatch.setattr(transfer, "PIECE", 56)
    assert same(filled(folder), tensors)


def test_shards_fill_what_a_single_file_fills(folder, tmp_path):
    sharded = make_model(tmp_path / "sharded", shard_size="20kB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert same(filled(sharded), filled(folder))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_weights_are_converted_to_the_dtype_asked_for(folder, monkeypatch, stored, wanted, suffix):
    monkeypatch.setattr(transfer, "PIECE", 1000)
    tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    if suffix == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    assert same(filled(folder, wanted), {name: tensor.to(wanted) for name, tensor in tensors.items()})


def test_a_bin_file_of_trained_parameters_fills_a_model_as_one_of_plain_tensors_does(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}, folder / "pytorch_model.bin")
    shards = filled(folder)
    assert same(shards, tensors)
    assert not any(shard.requires_grad for shard in shards.values())


def test_a_tied_head_that_is_stored_all_the_same_is_left_out(tmp_path):
    folder = make_model(tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    assert same(filled(folder), tensors)


def test_a_file_that_shrinks_while_it_is_read_is_refused_by_name(folder):
    checkpoint = open_checkpoint("m", folder, folder)
    weights = checkpoint.weights()
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(Refusal, match=r"model\.safetensors ended at \d+ bytes while it was read; copy or download"):
        transfer.fill(make_module(checkpoint.config, torch.float32, "cpu").shards(), weights, "m", lambda line: None)


def test_a_tensor_of_another_size_than_its_shape_is_refused(folder):
    file = folder / "model.safetensors"
    save_file({"odd": torch.zeros(3)}, file)
    file.write_bytes(file.read_bytes().replace(b"[3]", b"[2]"))
    with pytest.raises(Refusal, match=r"says 12 bytes for odd, F32 of \[2\]"):
        SafetensorsWeights({file: None})


def test_a_dtype_that_torch_would_have_to_unpack_is_refused_by_name(folder):
    save_file({"small": torch.zeros(3).to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(Refusal, match="small is in F8_E4M3; supported: F64, F32, F16, BF16"):
        SafetensorsWeights({folder / "model.safetensors": None})


def test_progress_is_a_line_at_the_end_with_size_and_speed(folder):
    lines = []
    filled(folder, report=lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("m: weights loaded, 0.00 GB in ")
    assert lines[0].endswith(" GB/s")


def test_a_terminal_sees_a_bar_that_fills(folder, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    filled(folder)
    assert terminal.getvalue().splitlines()[-1].startswith(f"m: [{'#' * 30}] 0.00 GB in ")


def test_lines_come_now_and_then_while_it_lasts(monkeypatch):
    monkeypatch.setattr(transfer, "REPORT_SECONDS", 0.0)
    lines = []
    transfer.Progress("m", 2_000_000_000, lines.append).tell(500_000_000)
    assert lines[0].startswith("m: 0.50 GB in ")
    assert lines[0].endswith(" so far, of 2.00 GB")


def resident(kind: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most since it was last reset."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[kind].split()[0]) * 1024


def test_weights_are_not_in_memory_twice(tmp_path):
    size = 96 << 20
    save_file({"weight": torch.ones(size // 4)}, tmp_path / "model.safetensors")
    weights = SafetensorsWeights({tmp_path / "model.safetensors": None})
    shards = {"weight": torch.zeros(size // 4)}
    shards["weight"].fill_(2)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of memory cannot be reset here")
    before = resident("VmRSS")
    transfer.fill(shards, weights, "m", lambda line: None)
    assert bool((shards["weight"] == 1).all())
    assert resident("VmHWM") - before < size / 2
