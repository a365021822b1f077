"""A model's files opened and found whole: shape, tokenizer and weights, with nothing read that is large."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from outrider_runtime.config import Method
from outrider_runtime.errors import Refusal
from outrider_runtime.models.config import ModelConfig, model_config, tensor_shapes
from outrider_runtime.models.eagle_config import eagle_config
from outrider_runtime.models.medusa_config import INSIDE, MedusaShape, medusa_config
from outrider_runtime.models.weights import Weights, expected, folder_weights, torn

if TYPE_CHECKING:
    from outrider_runtime.models.gguf import GGUFFile

MODEL_FILES = "model.safetensors, pytorch_model.bin or .gguf"
FOLDER_WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*")  # or their index
HEAD_FILES = "model.safetensors, pytorch_model.bin or medusa_lm_head.pt"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    name: str  # as the user wrote it
    path: Path
    config: ModelConfig
    tokenizer: Path  # a folder with tokenizer.json
    gguf: GGUFFile | None = None  # opened once: its header takes seconds

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, special tokens included. Raises Refusal."""
        file = self.tokenizer / "tokenizer.json"
        if not file.is_file():
            raise torn(file, "is missing (tokenizer.model alone is not read)")
        try:
            return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
        except Exception as error:  # the library raises bare Exceptions
            raise torn(file, f"is not a tokenizer ({str(error)[:80]})") from error

    def weights(self) -> Weights:
        """What there is to read, every tensor held against the shape. Raises Refusal."""
        weights: Weights = self.gguf or _folder_weights(self.name, self.path)
        own = {tensor: shape for tensor, shape in weights.shapes.items() if self._owns(tensor)}
        expected(own, tensor_shapes(self.config), self.name)
        return weights

    def _owns(self, tensor: str) -> bool:
        """A model may have Medusa heads inside, and these the model around them: one checkpoint of two parts."""
        if self.config.head is None:
            return not tensor.startswith(INSIDE)
        return not isinstance(self.config.head, MedusaShape) or tensor.startswith(self.config.head.prefix)


def open_checkpoint(name: str, path: Path, cache: Path) -> Checkpoint:
    """Read the shape and find the tokenizer. `cache`: where a GGUF file's tokenizer is unpacked. Raises Refusal."""
    if file := _gguf(name, path):
        from outrider_runtime.models.gguf import GGUFFile, tokenizer_folder  # imports what nothing else needs

        opened = GGUFFile(file)
        return Checkpoint(name, path, model_config(opened.config), tokenizer_folder(opened, cache), opened)
    generation = path / "generation_config.json"
    config = model_config(_json(path / "config.json"), _json(generation) if generation.is_file() else None)
    return Checkpoint(name, path, config, path)


def open_head(name: str, path: Path, method: Method, target: Checkpoint) -> Checkpoint:
    """Of what drafts from the hidden states of `target`. Its tensors, which are there, tell what it is. Raises
    Refusal."""
    if target.config.transformers is not None and method != "medusa":
        raise Refusal(
            "UnsupportedModel",
            f"{target.name}: {target.config.architecture} runs by transformers' code, which an EAGLE head cannot look "
            "into; use the method draft-model, ngram or medusa",
        )
    tensors = _folder_weights(name, path, HEAD_FILES).shapes
    if method == "medusa":
        config = medusa_config(name, tensors, target.config)
    else:
        version = 3 if method == "eagle3" else 1
        config = eagle_config(name, version, _json(path / "config.json"), tensors, target.config)
    return Checkpoint(name, path, config, target.tokenizer)


def refuse_head(name: str, path: Path) -> None:
    """Raises Refusal for a draft that is no model of its own, or is one for the heads in it, as far as its config.json
    says so: its weights need not be there."""
    file = path / "config.json"
    config = _json(file) if file.is_file() else {}
    if (method := _head_method(path, config)) is None:
        return
    told = f"it is a head, not a model of its own; use the method {method}"
    if method == "medusa" and "num_hidden_layers" in config:
        told = (
            f"it is a whole model with heads inside, which draft for that model; use the method medusa and give {name} "
            "as the target, too"
        )
    raise Refusal("UnsupportedModel", f"{name}: {told}")


def _head_method(path: Path, config: Mapping[str, Any]) -> Method | None:
    architectures = str(config.get("architectures")).lower()
    if "medusa_num_heads" in config:
        return "medusa"
    if "eagle3" in architectures or config.keys() & {"draft_vocab_size", "eagle_config", "speculators_model_type"}:
        return "eagle3"
    # EAGLE-1's calls itself a Llama, of one layer, and comes without a tokenizer
    alone = config.get("num_hidden_layers") == 1 and not (path / "tokenizer.json").is_file()
    return "eagle" if "eagle" in architectures or alone else None


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Raises Refusal when a file of the model called `name` may not be read in it, as on another user's claim."""
    try:
        yield
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise Refusal(
            "ModelNotFound",
            f"{name}: {error.filename} cannot be read ({error.strerror}); let user {os.getuid()} read all of the model",
        ) from error


def _folder_weights(name: str, path: Path, files: str = MODEL_FILES) -> Weights:
    if (weights := folder_weights(path)) is None:
        raise Refusal("ModelNotFound", f"{name}: no {files} in the folder; copy or download the model again")
    return weights


def _gguf(name: str, path: Path) -> Path | None:
    """The GGUF file to read, if that is what the model is: named itself, or the only one in a folder without other
    weights, as they are published with a config.json beside them or without."""
    if path.is_file():
        return path
    if (path / "config.json").is_file() and any(any(path.glob(weights)) for weights in FOLDER_WEIGHTS):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise Refusal("UnsupportedModel", f"{name}: {len(files)} GGUF files in the folder; name one of them")
    return files[0] if files else None


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise torn(file, "is missing") from error
    except ValueError as error:
        raise torn(file, "is not JSON") from error
    if not isinstance(found, dict):
        raise torn(file, "is not a JSON object")
    return found
