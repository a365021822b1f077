"""How fast weights get from files in the page cache to the device: python benchmarks/weights.py --gigabytes 16"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider_runtime.models.transfer import fill
from outrider_runtime.models.weights import SafetensorsWeights

TENSOR = (8192, 4096)  # 64 MiB in bfloat16
SHARD = 16  # tensors, so a GiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="to be converted to")
    parser.add_argument("--folder", type=Path, help="for the files; by default a temporary one")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        files: dict[Path, set[str] | None] = {}
        for shard in range(options.gigabytes):
            tensors = {f"{shard}.{i}": torch.full(TENSOR, shard + i, dtype=torch.bfloat16) for i in range(SHARD)}
            files[folder / f"{shard}.safetensors"] = None
            save_file(tensors, folder / f"{shard}.safetensors")
        del tensors
        dtype = getattr(torch, options.dtype)
        names = [f"{shard}.{i}" for shard in range(options.gigabytes) for i in range(SHARD)]
        shards = {name: torch.empty(TENSOR, dtype=dtype, device=options.device) for name in names}
        for _ in range(2):  # the first also makes what is made once, such as pinned memory
            fill(shards, SafetensorsWeights(files), options.device, print)
        wrong = [name for name in names if (shards[name] != sum(map(int, name.split(".")))).any()]
        print(f"peak of the host's memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB; {wrong=}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
