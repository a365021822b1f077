"""What a step yields, on its way from the device to the host: one small copy, awaited a step later.

Log-probabilities are a second copy, of those steps in which somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider_runtime.engine.messages import TokenLogprobs
from outrider_runtime.engine.scheduler import Chunk
from outrider_runtime.sampling.logprobs import Logprobs
from outrider_runtime.sampling.params import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request got in a step: the target's tokens, how many drafts were made for them and stood, and the
    tokens' log-probabilities where the request asked for them."""

    tokens: list[int]
    drafted: int
    accepted: int
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Ticket:
    """A launched step. result() waits for it; `done` is None where the host has done the work at launch."""

    def __init__(
        self, chunks: Sequence[Chunk], results: Tensor, logprobs: Tensor | None, done: torch.cuda.Event | None
    ) -> None:
        """`results` and `logprobs` are a Results' `tokens` and `logprobs`, on the host once the event has come."""
        self.chunks = chunks
        self.leases = [chunk.request.lease for chunk in chunks]
        self._results, self._logprobs, self.done = results, logprobs, done

    def result(self) -> list[Outcome]:
        """One for each chunk, in order; without tokens where none was sampled."""
        if self.done is not None:
            self.done.synchronize()
        outcomes, first_row = [], 0
        for chunk, row in zip(self.chunks, self._results[: len(self.chunks)].tolist(), strict=True):
            emitted, meant, *tokens = row
            drafted = min(chunk.draft_length, meant)
            outcomes.append(
                Outcome(
                    tokens[:emitted],
                    drafted,
                    max(0, min(drafted, emitted - 1)),
                    self._told(chunk, first_row, emitted),
                )
            )
            first_row += 1 + chunk.draft_length if chunk.samples else 0
        return outcomes

    def _told(self, chunk: Chunk, first_row: int, emitted: int) -> tuple[TokenLogprobs, ...] | None:
        count = chunk.request.params.logprobs
        if count is None or self._logprobs is None:
            return None
        rows = self._logprobs[first_row : first_row + emitted].numpy()
        values = rows.view(np.float32)
        return tuple(
            TokenLogprobs(chosen, tuple(zip(ids, likeliest, strict=True)))
            for chosen, ids, likeliest in zip(
                values[:, 0].tolist(),
                rows[:, 1 : 1 + count].tolist(),
                values[:, 1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + count].tolist(),
                strict=True,
            )
        )


class Results:
    """Fixed places on the device, where graphs leave a step's results, and on the host, two in turn: one may still be
    read while the next step's results come."""

    def __init__(self, requests: int, rows: int, longest_draft: int, device: torch.device) -> None:
        self.tokens = torch.zeros(requests, 3 + longest_draft, dtype=torch.int32, device=device)  # as commit() says
        # Of each row the drawn token's, the likeliest tokens' ids, and theirs; all but the ids float32.
        self.logprobs = torch.zeros(rows, 1 + 2 * MAX_LOGPROBS, dtype=torch.int32, device=device)
        self._waits = device.type == "cuda"
        self._tokens, self._logprobs = (
            [torch.zeros_like(places, device="cpu", pin_memory=self._waits) for _ in range(2)]
            for places in (self.tokens, self.logprobs)
        )

    def tell(self, found: Logprobs) -> None:
        """Of the step's first rows; fewer than MAX_LOGPROBS of the likeliest only where there are no more tokens."""
        rows, count = found.top.shape
        values = self.logprobs[:rows].view(torch.float32)
        values[:, 0] = found.chosen
        self.logprobs[:rows, 1 : 1 + count] = found.top_ids
        values[:, 1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + count] = found.top

    def send(self, chunks: Sequence[Chunk], *, logprobs: bool) -> Ticket:
        self._tokens.reverse()
        self._logprobs.reverse()
        self._tokens[0].copy_(self.tokens, non_blocking=True)
        if logprobs:
            self._logprobs[0].copy_(self.logprobs, non_blocking=True)
        done = None
        if self._waits:
            done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own gap
            done.record()
        return Ticket(chunks, self._tokens[0], self._logprobs[0] if logprobs else None, done)
