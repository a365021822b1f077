"""Sampling by slot: the kernels where there is a CUDA device, the pipeline in torch where not. Both draw the same."""

from __future__ import annotations

from torch import Tensor

from outrider_runtime.sampling.pipeline import draw
from outrider_runtime.sampling.table import Mode, SamplingTable


def sample(logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable, mode: Mode) -> Tensor:
    """[rows, vocab] logits to [rows] token ids, int32. The logits are left as they were.

    `slots` [rows] int32 say whose rows they are, `positions` [rows] int32 how many tokens stand before the drawn one:
    those are `table.tokens[slot, :position]`, drafts included. `mode` is the largest mode_of() of the requests; one
    larger than needed changes nothing. Equal logits go to the lowest id.
    """
    if logits.is_cuda:
        from outrider_runtime.kernels import sampling  # Triton is there with CUDA only

        return sampling.draw(logits, slots, positions, table, mode)
    return draw(logits, slots, positions, table, mode)


def draft(
    logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable, mode: Mode, token_ids: Tensor | None = None
) -> Tensor:
    """As sample(), and places what is drawn in the texts, at `positions`: `table.tokens[slot, position]`, or the last
    there is. `token_ids` [vocab] say what tokens the logits are of, if not of the first ones in order, as in Mode.FULL
    they must be."""
    if logits.is_cuda:
        from outrider_runtime.kernels import sampling

        return sampling.draw(logits, slots, positions, table, mode, place=True, token_ids=token_ids)
    drawn = draw(logits, slots, positions, table, mode, token_ids)
    table.tokens[slots, positions.clamp(max=table.tokens.shape[1] - 1)] = drawn
    return drawn
