"""The tensors of a checkpoint: what there is and where it lies, without reading it, and then one after the other."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider_runtime.errors import Refusal

# By their names in safetensors; integers and booleans are in tables that nobody reads
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# What GPTQ, AWQ, bitsandbytes, compressed-tensors and FP8 add to a layer; some of their checkpoints tell of it in files
# of their own, not in config.json
QUANTIZED = (".qweight", ".weight.absmax", ".SCB", ".weight_packed", ".weight_scale", ".weight_scale_inv")

_LFS_POINTER = b"version "  # what git clone leaves in a large file's place where Git LFS is not installed begins so

Shapes = Mapping[str, tuple[int, ...]]


class Weights(Protocol):
    """The weights of one checkpoint, on the CPU. Iterating reads them in the order they lie in."""

    shapes: Shapes  # by the tensors' names in Hugging Face's format
    nbytes: int  # on disk

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...

    def read(self, name: str) -> Tensor:
        """From any thread."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies as it is in memory, in bytes."""

    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype


class SafetensorsWeights:
    """One file or several. Headers are checked against the files' sizes at once. `places` are in the files' order."""

    def __init__(self, files: Mapping[Path, set[str] | None]) -> None:
        """`files`: each file with the tensors its index promises, None without an index."""
        shapes: dict[str, tuple[int, ...]] = {}
        places: dict[str, Place] = {}
        for file, promised in files.items():
            header, start = _safetensors_header(file)
            if absent := (promised or set()) - header.keys():
                raise torn(file, f"lacks {min(absent)}, which the index says it holds")
            shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
            places |= _places(file, header, start)
        self.files = tuple(files)
        self.shapes: Shapes = shapes
        self.places: Mapping[str, Place] = places
        self.nbytes = sum(file.stat().st_size for file in files)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.offset_keys():
                        yield name, tensors.get_tensor(name)
            except SafetensorError as error:
                raise torn(file, f"cannot be read: {error}") from error

    def read(self, name: str) -> Tensor:
        with safe_open(self.places[name].file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
            return tensor


class TorchWeights:
    """torch.save files of old (pytorch_model.bin), mapped, and opened without running any code they may hold."""

    def __init__(self, files: Mapping[Path, set[str] | None]) -> None:
        self.nbytes = sum(file.stat().st_size for file in files)
        self._tensors: dict[str, Tensor] = {}
        for file, promised in files.items():
            tensors = _torch_load(file)
            if absent := (promised or set()) - tensors.keys():
                raise torn(file, f"lacks {min(absent)}, which the index says it holds")
            # Parameters among them would have their copies tracked for a backward pass
            self._tensors |= {name: tensor.detach() for name, tensor in tensors.items()}
        self.shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def folder_weights(folder: Path) -> Weights | None:
    """The weights in a folder of Hugging Face's layout, or Medusa's; safetensors before others. None when there are
    none."""
    if files := _files(folder, "model", "safetensors"):
        return SafetensorsWeights(files)
    if files := _files(folder, "pytorch_model", "bin"):
        return TorchWeights(files)
    for suffix in ("safetensors", "pt"):
        if files := _files(folder, "medusa_lm_head", suffix):
            return SafetensorsWeights(files) if suffix == "safetensors" else TorchWeights(files)
    return None


def expected(found: Shapes, shapes: Shapes, name: str) -> None:
    """Hold what a checkpoint has against what its config.json asks for. Raises Refusal naming the first difference."""
    if quantized := [tensor for tensor in found.keys() - shapes.keys() if tensor.endswith(QUANTIZED)]:
        raise Refusal(
            "UnsupportedModel",
            f"{name}: the checkpoint is quantized, {min(quantized)} says; give one in bfloat16, float16 or float32, or "
            "a GGUF file",
        )
    if absent := shapes.keys() - found.keys():
        raise Refusal(
            "ModelNotFound",
            f"{name}: {len(absent)} tensors are missing, {min(absent)} first; copy or download the model again",
        )
    for tensor, shape in shapes.items():
        if found[tensor] != shape:
            raise Refusal(
                "UnsupportedModel",
                f"{name}: {tensor} has shape {list(found[tensor])}, config.json asks for {list(shape)}; "
                "give the config.json that goes with these weights",
            )
    unknown = {tensor for tensor in found.keys() - shapes.keys() if not derivable(tensor)}
    if unknown:
        raise Refusal(
            "UnsupportedModel",
            f"{name}: {len(unknown)} tensors that its architecture does not have, {min(unknown)} first; "
            "give the config.json that goes with these weights",
        )


def derivable(tensor: str) -> bool:
    """Tables and masks that old versions saved, the head of a model that ties it to its embedding, and what only the
    training of a draft needs."""
    return tensor in ("lm_head.weight", "t2d", "verifier_norm.weight", "verifier_lm_head.weight") or tensor.endswith(
        (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
    )


def torn(file: Path, what: str) -> Refusal:
    return Refusal("ModelNotFound", f"{file} {what}; copy or download the model again")


def _files(folder: Path, stem: str, suffix: str) -> dict[Path, set[str] | None]:
    """Files of one format, each with the tensors the index promises; empty when the folder has none of the format. A
    single file comes before an index, as in transformers: who joins shards leaves theirs behind."""
    if (single := folder / f"{stem}.{suffix}").is_file():
        return {single: None}
    index = folder / f"{stem}.{suffix}.index.json"
    if index.is_file():
        promised: dict[Path, set[str] | None] = {}
        for tensor, name in weight_map(index).items():
            promised[folder / name] = (promised.get(folder / name) or set()) | {tensor}
        for file in promised:
            if not file.is_file():
                raise torn(file, f"is missing, and {index.name} names it")
        return dict(sorted(promised.items()))
    shards = sorted(folder.glob(f"{stem}-*-of-*.{suffix}"))
    if shards:
        raise torn(index, "is missing, though there are shards")
    return {}


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises Refusal when the file is torn or names files outside the folder."""
    try:
        found = {str(tensor): str(file) for tensor, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise torn(index, "is not an index of weights") from error
    for file in set(found.values()):
        if Path(file).name != file:
            raise Refusal("UnsupportedModel", f"{index} names {file}, which is not in its own folder")
    return found


def _safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """Tensor name -> {dtype, shape, data_offsets}, and where the data begin that the offsets count from.

    The format: 8 bytes of length, JSON of that length, the data.
    """
    refuse_pointer(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise torn(file, f"is truncated: {size} bytes, its header alone is {length + 8}")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise torn(file, "has no safetensors header") from error
    if end != size:
        raise torn(file, f"is truncated: {size} bytes of {end}" if size < end else f"is {size} bytes, not {end}")
    return header, 8 + length


def refuse_pointer(file: Path) -> None:
    """Raises Refusal when Git LFS has not put the weights there."""
    with file.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            told = f"{file} is a pointer of Git LFS, not the weights; run git lfs pull where it lies"
            raise Refusal("ModelNotFound", told)


def _places(file: Path, header: Mapping[str, Any], start: int) -> dict[str, Place]:
    found = {}
    for name, entry in sorted(header.items(), key=lambda item: int(item[1]["data_offsets"][0])):
        begin, end = entry["data_offsets"]
        if (dtype := DTYPES.get(entry["dtype"])) is None:
            raise Refusal("UnsupportedModel", f"{file}: {name} is in {entry['dtype']}; supported: {', '.join(DTYPES)}")
        if end - begin != prod(entry["shape"]) * dtype.itemsize:
            raise torn(file, f"says {end - begin} bytes for {name}, {entry['dtype']} of {entry['shape']}")
        found[name] = Place(file, start + begin, end - begin, dtype)
    return found


def _torch_load(file: Path) -> dict[str, Tensor]:
    refuse_pointer(file)
    try:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:  # of torch < 1.6, which cannot be mapped
            if "mmap" not in str(error):
                raise
            found = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch passes on whatever it stumbles over in a file that is not whole
        # Of what it may not load it says only how to call torch.load, which nobody here does
        told = "" if isinstance(error, pickle.UnpicklingError) else str(error)
        reason = (told or type(error).__name__).splitlines()[0]
        raise torn(file, f"holds something other than tensors, or is truncated ({reason})") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()
    ):
        raise Refusal("UnsupportedModel", f"{file} is not a dictionary of tensors by name; give safetensors")
    return found
