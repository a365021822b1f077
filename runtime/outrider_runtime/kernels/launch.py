"""Programmatic dependent launch: a kernel's programs may start while the kernel before drains. One flag for them all.

A kernel launched so must wait (`gdc_wait`) before it reads what earlier kernels wrote, and before it writes anything.
"""

from __future__ import annotations

from typing import Any

_overlapped = False


def overlap_launches(on: bool) -> None:
    """For the launches that follow; a captured graph keeps what held at its capture. Needs compute capability 9.0."""
    global _overlapped
    _overlapped = on


def launch_options() -> dict[str, Any]:
    """Keyword arguments of every launch: the kernel's OVERLAP constant, and the launch attribute that goes with it."""
    return {"OVERLAP": _overlapped, "launch_pdl": _overlapped}
