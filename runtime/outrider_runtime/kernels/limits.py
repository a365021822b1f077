"""What bounds the tiles of kernels: tensor cores from below, a processor's shared memory from above.

Tiles are measured on an H200; other GPUs have less shared memory.
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
    """Bytes that a program may take; where nothing runs, as many as there are where tiles were measured."""
    if device.type != "cuda":
        return HOPPER
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
