"""How much of a processor's shared memory a program may take. Tiles are measured on an H200; other GPUs have less."""

from __future__ import annotations

from functools import cache

import torch

HOPPER = 227 << 10  # bytes


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes; where nothing runs, as much as there is where tiles were measured."""
    if device.type != "cuda":
        return HOPPER
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
