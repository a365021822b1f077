"""Batches of requests whose texts and blocks the host knows: what a feed is on the device, without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider_runtime.layers.attention import AttentionShape, plan_attention, plan_layers
from outrider_runtime.layers.batch import Batch


@dataclass(frozen=True, slots=True)
class Span:
    """One request's share of a step: consecutive tokens, the first at position `start`, and the request's blocks."""

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def make_batch(spans: Sequence[Span], block_size: int, device: torch.device | str, shape: AttentionShape) -> Batch:
    """The batch of these spans, none empty, whose blocks reach to their ends."""
    lengths = [len(span.token_ids) for span in spans]
    width = max(-(-span.end // block_size) for span in spans)
    tables = [list(span.blocks[:width]) + [0] * (width - len(span.blocks)) for span in spans]
    block_tables = torch.tensor(tables, dtype=torch.int64, device=device)
    token_ids = [token for span in spans for token in span.token_ids]
    positions = [position for span in spans for position in range(span.start, span.end)]
    owners = [row for row, length in enumerate(lengths) for _ in range(length)]
    flat = torch.tensor([token_ids, positions, owners], dtype=torch.int64, device=device)
    slots = block_tables[flat[2], flat[1] // block_size] * block_size + flat[1] % block_size
    ends = [span.end for span in spans]
    plan = plan_layers(shape, lambda kind: plan_attention(lengths, ends, flat[1], block_tables, block_size, kind))
    return Batch(token_ids=flat[0], positions=flat[1], slots=slots, attention=plan)
