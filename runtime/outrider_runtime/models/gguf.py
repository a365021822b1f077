"""GGUF files: shape, tensors and tokenizer of a Llama-family model, all from the one file, dequantised on reading."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from outrider_runtime.errors import Refusal, in_a_line
from outrider_runtime.models.host import writable
from outrider_runtime.models.weights import Shapes, refuse_pointer, torn

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Llama 3's scaling is in a GGUF only as the table it makes; these are the parameters ever published for it
_LLAMA3 = [
    {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for factor in (8.0, 32.0)
]

# Vocabularies of Llama 3, by llama.cpp's names: their texts begin with BOS where a header says nothing of it
_BEGUN = ("llama3", "llama-v3", "llama-bpe")

UNPACKED = 1  # the way tokenizer_folder() unpacks; another number for another way, or old folders stay in use


class GGUFFile:
    """An open GGUF file: `config` in the form of config.json, and Weights (models/weights.py)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = path.stat().st_size
        refuse_pointer(path)
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise torn(path, f"is no whole GGUF file ({str(error).splitlines()[0]})") from error
        self._architecture = str(self._value("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            raise _unsupported(path, f"architecture {self._architecture}; supported: {', '.join(_ARCHITECTURES)}")
        if (parts := self._value("split.count", 1)) > 1:
            raise _unsupported(path, f"one of {parts} parts; join them with llama-gguf-split --merge")
        if self._setting("expert_count", 0):
            raise _unsupported(path, "a mixture of experts")
        self._tensors = {
            _name(tensor.name, path): tensor for tensor in self._reader.tensors if tensor.name != "rope_freqs.weight"
        }
        self.shapes: Shapes = {  # a GGUF gives the fastest dimension first
            name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }
        self.config = self._config()
        self.begins_texts = bool(
            self._value("tokenizer.ggml.add_bos_token", self._value("tokenizer.ggml.pre") in _BEGUN)
        )

    @property
    def header(self) -> bytes:
        """All but the weights: tokenizer, chat template and shape."""
        return bytes(self._reader.data[: self._reader.data_offset])

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._tensors:
            yield name, self.read(name)

    def read(self, name: str) -> Tensor:
        """float32, whatever the file's quantization."""
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise _unsupported(self.path, f"{tensor.name} is in {tensor.tensor_type.name}") from error
        return self._in_order(name, torch.from_numpy(np.require(values, np.float32, ["W"])))

    def _in_order(self, name: str, tensor: Tensor) -> Tensor:
        """Undo the order that `llama` files keep the rows of q and k in: rotary pairs side by side, per head."""
        if self._architecture != "llama" or (".q_proj." not in name and ".k_proj." not in name):
            return tensor
        heads = self.config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, ...]
        return pairs.transpose(1, 2).reshape(tensor.shape)

    def _config(self) -> dict[str, Any]:
        if "model.embed_tokens.weight" not in self.shapes:
            raise _unsupported(self.path, "no weights, or not all: token_embd.weight is missing")
        eos = [self._value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        hidden, heads = self._size("embedding_length"), self._size("attention.head_count")
        return {
            "architectures": [_ARCHITECTURES[self._architecture]],
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "hidden_size": hidden,
            "intermediate_size": self._setting("feed_forward_length"),
            "num_hidden_layers": self._setting("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._setting("attention.head_count_kv", heads),
            "head_dim": self._setting("attention.key_length", hidden // heads),
            "max_position_embeddings": self._setting("context_length"),
            "rms_norm_eps": self._setting("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._setting("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._tensors,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "dtype": "float32",
            "eos_token_id": list(dict.fromkeys(id_ for id_ in eos if id_ is not None)),
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        for tensor in self._reader.tensors:
            if tensor.name == "rope_freqs.weight":
                return self._llama3(np.asarray(tensor.data, dtype=np.float64))
        kind = self._setting("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self._setting("rope.scaling.factor", 1.0)}
        original = self._setting("rope.scaling.original_context_length", 0)
        return scaling | ({"original_max_position_embeddings": original} if original else {})

    def _llama3(self, table: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
        """The parameters whose table is this one: by how much each rotary frequency is divided."""
        theta = float(self._setting("rope.freq_base", 10000.0))
        wavelength = 2 * np.pi * theta ** (np.arange(len(table)) / len(table))
        for known in _LLAMA3:
            turns = known["original_max_position_embeddings"] / wavelength
            low, high = known["low_freq_factor"], known["high_freq_factor"]
            smooth = np.clip((turns - low) / (high - low), 0, 1)
            if np.allclose(table, 1 / (smooth + (1 - smooth) / known["factor"]), rtol=1e-3):
                return {"rope_type": "llama3", **known}
        raise _unsupported(self.path, "a rope_freqs table of unknown origin")

    def _size(self, name: str) -> int:
        size = self._setting(name)
        if not isinstance(size, int) or size < 1:
            raise _unsupported(self.path, f"{self._architecture}.{name} is {size!r}; it must be a positive integer")
        return size

    def _setting(self, name: str, default: Any = None) -> Any:
        return self._value(f"{self._architecture}.{name}", default)

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()


def tokenizer_folder(file: GGUFFile, cache: Path) -> Path:
    """The file's tokenizer as a folder with tokenizer.json and the chat template, made once under `cache`. Its name
    tells what it was made from and by, for another file may come to the same place with the same size and time."""
    by = f"{UNPACKED} transformers {version('transformers')} "
    key = hashlib.sha256(by.encode() + file.header).hexdigest()[:16]
    folder = cache / f"{file.path.stem}-{key}"
    if folder.is_dir():
        return folder
    from transformers import AutoTokenizer  # seconds to import, and needed for this alone

    writable(cache)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    except Exception as error:  # of many kinds, KeyErrors among them
        raise _unsupported(file.path, f"its tokenizer cannot be read ({in_a_line(error)})") from error
    if eos := file.config["eos_token_id"]:  # some versions of transformers take another token for it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos[0])
    if file.begins_texts:  # which transformers believes of a header alone
        tokenizer.add_bos_token = True
    scratch = Path(tempfile.mkdtemp(dir=cache))
    try:
        tokenizer.save_pretrained(scratch)
        scratch.replace(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _name(tensor: str, path: Path) -> str:
    """blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight"""
    match tensor.split("."):
        case ["blk", layer, part, kind] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{kind}"
        case [part, kind] if part in _OUTER:
            return f"{_OUTER[part]}.{kind}"
    raise _unsupported(path, f"tensor {tensor}, which no supported architecture has")


def _unsupported(path: Path, what: str) -> Refusal:
    return Refusal("UnsupportedModel", f"{path}: {what}")
