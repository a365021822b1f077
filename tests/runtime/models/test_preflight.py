"""From a configuration to loaded models, and each refusal on the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.folders import make_model

from outrider_runtime.check import run_check
from outrider_runtime.config import CacheConfig, EngineConfig, SourceConfig, SpeculationConfig
from outrider_runtime.engine.messages import DraftState
from outrider_runtime.errors import EXIT_CODES, Refusal
from outrider_runtime.models import preflight as preflight_module
from outrider_runtime.models.loader import load
from outrider_runtime.models.memory import Memory
from outrider_runtime.models.preflight import choose_dtype, preflight
from outrider_runtime.speculation.policy import Policy


def config(target, draft=None, **changes):
    speculation = SpeculationConfig()
    if draft is not None:
        speculation = SpeculationConfig("draft-model", SourceConfig(str(draft)))
    return EngineConfig(SourceConfig(str(target)), speculation=speculation, **changes)


def quiet(line):
    pass


def refusal(settings):
    with pytest.raises(Refusal) as caught:
        load(settings, quiet)
    return caught.value.reason, caught.value.message


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def test_target_and_draft_are_loaded_with_their_weights(tiny_model_dir, tiny_draft_dir):
    lines = []
    loaded = load(config(tiny_model_dir, tiny_draft_dir, cache=CacheConfig(num_blocks=8)), lines.append)
    for model, folder in ((loaded.target, tiny_model_dir), (loaded.draft, tiny_draft_dir)):
        tensors = load_file(folder / "model.safetensors")
        for name, place in model.module.shards().items():
            assert torch.equal(place, tensors[name])
        assert model.loaded.parameters == sum(tensor.numel() for tensor in tensors.values())
        assert model.loaded.dtype == "Float32"
    assert loaded.draft_state == DraftState(True, model=loaded.draft.loaded)
    assert loaded.tokenizer_path == tiny_model_dir
    assert (loaded.num_blocks, loaded.max_model_len) == (8, 128)
    assert loaded.eos_token_ids == (1,)
    assert loaded.vocab_size == loaded.target.config.vocab_size
    assert [line.split(":")[0] for line in lines[:5]] == ["target", "draft", "tokenizers", "end tokens", "memory"]


def test_without_a_draft_model_none_is_required(tiny_model_dir):
    loaded = load(config(tiny_model_dir), quiet)
    assert loaded.draft is None
    assert loaded.draft_state == DraftState(True, "NotRequired")
    assert loaded.max_model_len == 512


def test_a_draft_of_another_tokenizer_is_refused_and_the_target_served(tiny_model_dir, foreign_draft_dir):
    loaded = load(config(tiny_model_dir, foreign_draft_dir), quiet)
    assert loaded.draft is None
    assert not loaded.draft_state.ok
    assert loaded.draft_state.reason == "TokenizerMismatch"
    assert loaded.draft_state.message.startswith(f"target {tiny_model_dir} and draft {foreign_draft_dir} disagree on")
    assert loaded.draft_state.message.endswith("; give a draft of the same tokenizer")


def test_a_draft_that_is_not_there_is_refused_and_the_target_served(tiny_model_dir):
    state = load(config(tiny_model_dir, "/no/such/draft"), quiet).draft_state
    assert (state.ok, state.reason) == (False, "ModelNotFound")


def test_a_draft_of_an_unsupported_architecture_is_refused(tiny_model_dir, tiny_draft_dir, tmp_path):
    draft = edit_config(shutil.copytree(tiny_draft_dir, tmp_path / "d"), architectures=["MambaForCausalLM"])
    assert load(config(tiny_model_dir, draft), quiet).draft_state.reason == "UnsupportedModel"


def test_a_draft_that_does_not_fit_beside_the_target_is_refused(tiny_model_dir, tiny_draft_dir, monkeypatch):
    room = preflight(config(tiny_model_dir), quiet, quiet).plan
    least = room.weights + room.workspace + 32 * room.block  # the model's whole context, and nothing more
    monkeypatch.setattr(preflight_module, "cpu_memory", lambda: Memory(10**12, int(least / 0.9) + 1000))
    found = preflight(config(tiny_model_dir, tiny_draft_dir), quiet, quiet)
    assert (found.draft, found.draft_state.reason, found.plan.draft_weights) == (None, "DoesNotFit", 0)


@pytest.mark.parametrize("mode", ["Auto", "Disabled"])
def test_only_the_mode_enabled_insists_on_the_draft(tiny_model_dir, foreign_draft_dir, mode):
    settings = config(tiny_model_dir, foreign_draft_dir, policy=Policy(mode=mode))
    assert load(settings, quiet).draft_state.reason == "TokenizerMismatch"
    reason, message = refusal(replace(settings, policy=Policy(mode="Enabled")))
    assert reason == "DraftUnavailable"
    assert message.startswith("mode Enabled needs the draft, which was refused: TokenizerMismatch: target ")


def test_a_draft_of_a_shorter_context_says_what_happens(tiny_model_dir, tmp_path):
    draft = make_model(tmp_path / "short", num_hidden_layers=1, max_position_embeddings=64)
    state = preflight(config(tiny_model_dir, draft), quiet, quiet).draft_state
    assert state.ok
    assert state.message == "draft: reads 64 tokens of the target's 512; what follows is decoded without drafts"
    assert preflight(config(tiny_model_dir, draft, max_model_len=64), quiet, quiet).draft_state.message == ""


@pytest.mark.parametrize(
    ("changes", "reason", "told"),
    [
        ({"tensor_parallel_size": 4}, "UnsupportedParallelism", "--tensor-parallel-size 4; only 1 is supported"),
        ({"max_model_len": 513}, "InvalidArgument", "max model length 513 is more than the model's own 512; lower it"),
        ({"cache": CacheConfig(num_blocks=10**9)}, "DoesNotFit", "weights 0.1 MB + workspace"),
        ({"device": "cuda"}, "InvalidArgument", "no CUDA device is visible"),
    ],
)
def test_what_a_target_cannot_be_served_with_is_refused(tiny_model_dir, monkeypatch, changes, reason, told):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, message = refusal(config(tiny_model_dir, **changes))
    assert found == reason
    assert told in message


@pytest.mark.parametrize(
    ("device", "asked", "checkpoint", "expected"),
    [
        ("cpu", "auto", "bfloat16", torch.float32),
        ("cpu", "bfloat16", "float32", torch.bfloat16),
        ("cuda", "auto", "bfloat16", torch.bfloat16),
        ("cuda", "auto", "float32", torch.float32),
        ("cuda", "float16", "bfloat16", torch.float16),
    ],
)
def test_auto_is_the_checkpoints_dtype_and_float32_on_a_cpu(tiny_model_dir, device, asked, checkpoint, expected):
    shape = preflight(config(tiny_model_dir), quiet, quiet).target.checkpoint.config
    settings = config(tiny_model_dir, device=device, dtype=asked)
    assert choose_dtype(settings, replace(shape, dtype=checkpoint)) == expected


def test_a_checkpoint_in_eight_bits_is_refused_by_its_dtype(tiny_model_dir):
    shape = preflight(config(tiny_model_dir), quiet, quiet).target.checkpoint.config
    with pytest.raises(Refusal, match="dtype float8_e4m3fn; supported: bfloat16, float16, float32"):
        choose_dtype(config(tiny_model_dir, device="cuda"), replace(shape, dtype="float8_e4m3fn"))


def test_a_torn_target_is_refused_before_the_draft_is_looked_at(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "torn")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    reason, message = refusal(config(folder, "/no/such/draft", policy=Policy(mode="Enabled")))
    assert reason == "ModelNotFound"
    assert "model.safetensors is truncated" in message


@pytest.mark.parametrize("method", ["draft-model", "eagle3"])
def test_a_draft_that_may_not_be_read_is_refused_by_its_file_and_the_target_served(
    tiny_model_dir, tmp_path, monkeypatch, method
):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "private")
    opened = Path.open

    def denied(path, *arguments, **options):
        if path.parent == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", denied)
    speculation = SpeculationConfig(method, SourceConfig(str(folder)))
    found = preflight(replace(config(tiny_model_dir), speculation=speculation), quiet, quiet)
    file = folder / ("model.safetensors" if method == "eagle3" else "config.json")
    assert (found.draft, found.draft_state.reason) == (None, "ModelNotFound")
    assert found.draft_state.message == (
        f"{folder}: {file} cannot be read (Permission denied); let user {os.getuid()} read all of the model"
    )


def test_a_folder_in_a_files_place_is_refused_by_its_name(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "m")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    lines = []
    assert run_check(config(folder), lines.append) == EXIT_CODES["ModelNotFound"]
    assert lines[-1].startswith(f"refused  ModelNotFound: {folder}: {folder / 'config.json'} cannot be read (Is a dir")


def test_check_says_a_line_for_each_check_and_exits_with_zero(tiny_model_dir, tiny_draft_dir):
    lines = []
    assert run_check(config(tiny_model_dir, tiny_draft_dir), lines.append) == 0
    assert [line.split(":")[0].split() for line in lines] == [
        ["ok", "target"],
        ["ok", "draft"],
        ["ok", "tokenizers"],
        ["ok", "end", "tokens"],
        ["ok", "memory"],
    ]


@pytest.mark.parametrize("mode", ["Auto", "Enabled"])
def test_check_exits_with_the_code_of_the_refusal(tiny_model_dir, foreign_draft_dir, mode):
    lines = []
    code = run_check(config(tiny_model_dir, foreign_draft_dir, policy=Policy(mode=mode)), lines.append)
    assert code == EXIT_CODES["TokenizerMismatch" if mode == "Auto" else "DraftUnavailable"]
    assert lines[-1].startswith("refused  ")
    assert "TokenizerMismatch: target " in lines[-1]


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("chat_template.jinja", "{% if %}", "the chat template does not parse"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
    ],
)
def test_check_refuses_what_the_server_would_refuse_once_it_has_read_the_weights(
    tiny_model_dir, tmp_path, file, text, told
):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "m")
    (folder / file).write_text(text)
    lines = []
    assert run_check(config(folder), lines.append) == EXIT_CODES["UnsupportedModel"]
    assert lines[-1].startswith("refused  UnsupportedModel: ")
    assert told in lines[-1]


@pytest.mark.model
def test_the_demo_pair_fits_together(demo_models):
    pair = [demo_models / f"smollm2-135m-instruct{suffix}" for suffix in ("", "-int4")]
    loaded = load(config(*pair, max_model_len=256, cache=CacheConfig(num_blocks=16)), quiet)
    assert loaded.draft_state.ok
    assert loaded.target.loaded.parameters == loaded.draft.loaded.parameters == 134_515_008
    assert loaded.eos_token_ids == (2,)
