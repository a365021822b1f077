"""What bounds the tiles of kernels: tensor cores from below, a processor's shared memory from above.

Tiles are measured on an H200; other GPUs have less shared memory. Where nothing runs, devices are taken for one.
"""

from __future__ import annotations

from functools import cache

import torch

HOPPER = 227 << 10  # bytes of shared memory that a program may take


def padded(size: int) -> int:
    """That a side of a product is padded to: a power of two, 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may take."""
    if device.type != "cuda":
        return HOPPER
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


@cache
def hopper(device: torch.device) -> bool:
    """Whether it is an H100, H200 or their like: with asynchronous tensor cores, and copies of tiles into memory."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


@cache
def processors(device: torch.device) -> int:
    """How many of them; two where nothing runs, so that tests see persistent programs take several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
