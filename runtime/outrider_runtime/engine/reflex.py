"""Between requests and the reflex (speculation/adaptive.py): what it is asked before a step, and told afterwards."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outrider_runtime.engine.request import Request
from outrider_runtime.engine.runner import Runner
from outrider_runtime.engine.scheduler import Chunk
from outrider_runtime.sampling.table import Mode
from outrider_runtime.speculation.adaptive import Adaptive, Decoding
from outrider_runtime.speculation.cost import CostTable, ModelShape, StepShape
from outrider_runtime.speculation.policy import Policy
from outrider_runtime.speculation.proposer import Proposer, Read

CAPTURE_SECONDS = 10.0  # without an idle moment, before one graph is captured between two steps: a tenth of a second


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a step does of the draft, beside its chunks' draft_length: turns of the loop, and what is read before it."""

    turns: int = 0
    reads: list[Read] = field(default_factory=list)
    shape: StepShape | None = None  # None: nobody wants to know what it takes


class Reflex:
    """Of an engine that has a proposer. `now` is the engine's clock."""

    def __init__(self, runner: Runner, proposer: Proposer, policy: Policy, max_model_len: int) -> None:
        self._runner, self._proposer, self._max_model_len = runner, proposer, max_model_len
        sizes = runner.sizes
        self.table = CostTable(
            ModelShape.of(runner.target),
            proposer.shape,
            token_buckets=sizes.tokens,
            request_buckets=sizes.requests,
            draft_lengths=sizes.lengths,
        )
        self._drafts = runner.draft_sizes  # by turns, which are what the reflex decides
        self._chains = self._drafts == tuple(range(len(self._drafts)))  # one token a turn
        self._short = proposer.reach < max_model_len  # there are texts that it does not draft behind
        self.adaptive = Adaptive(
            self.table,
            policy,
            max_concurrency=sizes.requests[-1],
            reads_prompts=proposer.reads,
            sizes=self._drafts,
        )
        self.effective_tokens: float | None = None  # mean of the requests that decode; None while nobody does
        self._context: float | None = None  # theirs, mean
        self._captured_at: float | None = None  # or idle

    @property
    def expected(self) -> float | None:
        """Drafts that a request is likely to have in the next step, on average; None where the policy demands that all
        draft what they have room for, even if the last step's did not."""
        return self.adaptive.expected if self.adaptive.free else None

    def set_policy(self, policy: Policy) -> None:
        self.adaptive.policy = policy
        self.effective_tokens = None

    def admit(self, requests: Iterable[Request]) -> None:
        """What was learned of the requests that had their slots does not hold for them."""
        for request in requests:
            assert request.slot is not None
            self.adaptive.forget(request.slot)

    def pays(self, requests: int, now: float) -> bool:
        """Whether so many may be expected to draft, in the next step or soon."""
        return self.adaptive.expected > 0 or self.adaptive.will_pay(requests, self._context or 0.0, now)

    def decide(self, chunks: Sequence[Chunk], now: float, waiting: int = 0) -> Drafting:
        """For the next step; sets each chunk's draft_length, up to now the most that there is room for. `waiting`:
        requests that are not admitted yet, though there are slots for them."""
        decoding = [chunk for chunk in chunks if chunk.decodes]
        prompts = [chunk for chunk in chunks if not chunk.decodes]
        columns = self._columns(decoding)
        mode = max(chunk.request.mode for chunk in chunks)
        self.adaptive.captured = self._runner.captured_sizes(mode, max((chunk.length for chunk in prompts), default=1))
        decision = self.adaptive.decide(columns, sum(chunk.length for chunk in prompts), now, len(prompts) + waiting)
        self._capture_meanwhile(len(decoding), mode, now)
        reads = []
        for chunk, length, missed in zip(decoding, decision.lengths.tolist(), decision.reads.tolist(), strict=True):
            drafts = length if chunk.request.reads_text else self._drafts[length]
            if drafts < chunk.draft_length:
                chunk.draft_length = drafts
            if missed > 0:
                reads.append(_read(chunk.request, missed))
        if decision.follows:
            reads += self._follow(prompts, self._runner.sizes.tokens[-1] - sum(read.length for read in reads))
        self.effective_tokens = self.adaptive.effective_tokens if decoding else None
        if decoding:
            self._context = float(columns.contexts.mean())
        # Steps of requests that want no drafts would say of a speed-up that there is none.
        wanted = not decoding or any(chunk.request.params.speculative != 0 for chunk in decoding)
        return Drafting(decision.turns, reads, decision.shape if wanted else None)

    def idle(self, now: float) -> None:
        """There was a moment to capture graphs in."""
        self._captured_at = now

    def observe(
        self,
        drafting: Drafting,
        chunks: Sequence[Chunk],
        verified: Sequence[tuple[int, int, int]],
        seconds: float | None,
        now: float,
    ) -> None:
        """A step of these chunks has ended, and took so long, if that is known. `verified`: slot of a request, its
        drafts, and how many of them stood."""
        shape = drafting.shape
        if shape is None:
            return
        tokens = sum(chunk.length + chunk.draft_length for chunk in chunks)
        if tokens < shape.tokens:  # what was not found was not verified
            shape = replace(shape, tokens=tokens, rows=shape.rows - (shape.tokens - tokens))
        slots, drafted, accepted = zip(*verified, strict=True) if verified else ((), (), ())
        turns: Sequence[int] = drafted
        if not self._chains:
            pairs = zip(drafted, accepted, strict=True)
            turns = [max(stood, min(self._turns(drafts), drafting.turns)) for drafts, stood in pairs]
        self.adaptive.observe(slots, turns, accepted, shape, seconds, now)

    def break_even(self, now: float) -> int | None:
        return None if self._context is None else self.adaptive.break_even(self._context, now)

    def _capture_meanwhile(self, requests: int, mode: Mode, now: float) -> None:
        """Where requests leave no idle moment, what they might draft with is captured in spite of that."""
        if self._captured_at is None:
            self._captured_at = now
        if self.adaptive.free and requests and now - self._captured_at >= CAPTURE_SECONDS:
            self._captured_at = now
            self._runner.capture_for(requests, self.adaptive.allowed, mode)

    def _columns(self, decoding: Sequence[Chunk]) -> Decoding:
        """Of a list each, which is done in every step."""
        requests = [chunk.request for chunk in decoding]
        ends = np.array([chunk.end for chunk in decoding], dtype=np.int64)  # the texts', at least
        limits = [request.prompt_length + request.params.max_tokens for request in requests]
        return Decoding(
            slots=np.array([request.slot for request in requests], dtype=np.int64),
            contexts=ends,
            caps=np.array([self._cap(chunk) for chunk in decoding], dtype=np.int64),
            missed=np.array(
                [self._proposer.missed(request) for request in requests] if self._proposer.reads else [0] * len(ends),
                dtype=np.int64,
            ),
            remaining=np.minimum(np.array(limits, dtype=np.int64), self._max_model_len) - ends,
        )

    def _cap(self, chunk: Chunk) -> int:
        cap = chunk.draft_length if self._chains else self._turns(chunk.draft_length)
        if self._short:
            cap = min(cap, max(0, self._proposer.reach - chunk.request.longest))
        return min(cap, self._proposer.most(chunk)) if self._proposer.bounded else cap

    def _turns(self, drafts: int) -> int:
        """That make so many; the last of them may be cut short."""
        most = len(self._drafts) - 1
        return most if drafts >= self._drafts[most] else bisect_left(self._drafts, drafts)

    def _follow(self, prompts: Sequence[Chunk], room: int) -> list[Read]:
        """The draft reads what the target reads, and of a cached prefix what it has not: the shortest gaps first."""
        reads = []
        for chunk in sorted(prompts, key=lambda chunk: chunk.end - chunk.request.draft_computed):
            request = chunk.request
            length = min(chunk.end - request.draft_computed, room)
            if length > 0 and request.params.speculative != 0 and chunk.end <= self._proposer.reach:
                reads.append(_read(request, length))
                room -= length
        return reads


def _read(request: Request, length: int) -> Read:
    read = Read(request, request.draft_computed, length)
    request.draft_computed += length
    return read
