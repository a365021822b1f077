"""A model folder of a named shape with random weights, for benchmarks that need files: a server, or loading.

    python benchmarks/model_folder.py --shape llama-8b FOLDER

A few gigabytes a second where FOLDER is in memory (/dev/shm). The tokenizer knows all 256 bytes, and calls every other
id by its number.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from decode import SHAPES, synthetic

SHARD_BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="that draws them")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    write_weights(given.folder, given.shape, getattr(torch, given.dtype), given.device)
    end = SHAPES[given.shape]["vocab_size"] - 1
    config = {**SHAPES[given.shape], "model_type": "llama", "torch_dtype": given.dtype, "eos_token_id": end}
    if config["architectures"] == ["Qwen2ForCausalLM"]:
        config["model_type"] = "qwen2"
    (given.folder / "config.json").write_text(json.dumps(config))
    tokenizer(end + 1).save(str(given.folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"<{end}>"}
    (given.folder / "tokenizer_config.json").write_text(json.dumps(told))


def write_weights(folder: Path, shape: str, dtype: torch.dtype, device: str) -> None:
    """Under the names of a checkpoint."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in synthetic(shape, dtype, device).shards().items():
        if sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
        shards[-1][name] = tensor
    index = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in shard.items()}, folder / file)
        index |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def tokenizer(size: int) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(letters)}
    words |= {f"w{number}": number for number in range(len(letters), size - 1)}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(f"<{size - 1}>", special=True)])
    return made


if __name__ == "__main__":
    main()
