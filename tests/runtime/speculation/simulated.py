"""An engine with known step times and acceptance, in simulated seconds: what the reflex is judged on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from outrider_runtime.speculation.adaptive import Adaptive, Decision, Decoding
from outrider_runtime.speculation.cost import CostTable, ModelShape, StepShape
from outrider_runtime.speculation.policy import Policy

TOKEN_BUCKETS = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    160,
    192,
    256,
    320,
    384,
    512,
    640,
    768,
    1024,
    1280,
    1536,
    2048,
)
REQUEST_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
LENGTHS = (1, 2, 3, 4, 6, 8)
CONTEXT = 256
OUTPUT = 384
PROMPT = 128

TARGET = ModelShape(7.0e9, 0.53e9, 131_072)
DRAFT = ModelShape(0.97e9, 0.26e9, 32_768)

# An 8B shape on one H200, measured: milliseconds of the linear layers by tokens. What a fit never sees exactly.
_TARGET_MS = np.array(
    [[1, 3.9], [16, 3.95], [32, 4.73], [64, 4.89], [128, 5.36], [256, 6.9], [512, 12.3], [1024, 22.1], [2048, 43.0]]
)
_DRAFT_MS = np.array([[1, 0.8], [16, 0.82], [64, 0.97], [128, 1.15], [256, 1.6]])


def true_seconds(shape: StepShape, *, model: bool = True) -> float:
    """Without a model, drafts are looked up."""
    milliseconds = 0.15 + float(np.interp(padded(TOKEN_BUCKETS, shape.tokens), *_TARGET_MS.T))
    milliseconds += shape.kv_tokens * 131_072 / 3.4e9
    if shape.draft_length:
        if model:
            turn = float(np.interp(padded(REQUEST_BUCKETS, shape.draft_requests), *_DRAFT_MS.T))
            milliseconds += shape.draft_length * (turn + shape.draft_kv_tokens * 32_768 / 3.0e9)
        else:
            milliseconds += 0.02
    if shape.draft_reads and model:
        milliseconds += max(0.85, shape.draft_reads * 0.0042)
    return milliseconds / 1e3


def padded(buckets: tuple[int, ...], size: int) -> int:
    return next((bucket for bucket in buckets if bucket >= size), buckets[-1])


def make_table(*, model: bool = True, fit: bool = True, concurrency: int = 256) -> CostTable:
    table = CostTable(
        TARGET,
        DRAFT if model else None,
        token_buckets=TOKEN_BUCKETS,
        request_buckets=REQUEST_BUCKETS,
        draft_lengths=LENGTHS,
    )
    if fit:
        table.fit([(shape, true_seconds(shape, model=model)) for shape in table.calibration(concurrency, 2048)])
    return table


def tokens_per_second(
    count: int, length: int, acceptance: float, *, model: bool = True, context: int = CONTEXT
) -> float:
    """Of one draft length for all, in truth."""
    shape = StepShape(
        count * (1 + length),
        count * (1 + length),
        count * context,
        count if length else 0,
        length,
        count * context if length else 0,
    )
    if shape.tokens > TOKEN_BUCKETS[-1]:
        return 0.0
    return count * sum(acceptance**j for j in range(length + 1)) / true_seconds(shape, model=model)


def best_fixed(count: int, acceptance: float, *, model: bool = True, longest: int = 8) -> float:
    return max(
        tokens_per_second(count, length, acceptance, model=model) for length in (0, *LENGTHS) if length <= longest
    )


@dataclass
class Step:
    """What one step did. `tokens` are expected, not drawn, so that judging it needs no luck."""

    at: float
    seconds: float
    running: int
    tokens: float
    plain: float  # tokens a second that plain decoding would have had
    lengths: np.ndarray
    decision: Decision


@dataclass
class Simulation:
    """Steps overlap: each is decided before the one before it has been observed. Requests that end are replaced."""

    adaptive: Adaptive
    model: bool = True
    seed: int = 0
    noise: float = 0.02
    now: float = 100.0
    steps: list[Step] = field(default_factory=list)
    stall: Callable[[float], float] = lambda now: 0.0
    slowness: float = 1.0  # of everything
    prompts: bool = False
    output: int = OUTPUT  # tokens of a request
    turnover: bool = False  # who ends is followed by one whose prompt is read first
    arriving: int = 0  # requests whose prompts are read one after the other, as many at once as a step has room for

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._contexts = np.zeros(0, dtype=np.int64)
        self._missed = np.zeros(0, dtype=np.int64)
        self._left = np.zeros(0, dtype=np.int64)
        self._pending: tuple | None = None
        self._read = 0  # of the first arriving one's prompt

    def run(self, seconds: float, running: int, acceptance: float | np.ndarray) -> list[Step]:
        """So many more seconds; `acceptance` may differ by request."""
        self._resize(running)
        chances = np.broadcast_to(np.asarray(acceptance, dtype=float), (running,))
        end, first = self.now + seconds, len(self.steps)
        while self.now < end:
            self._step(chances)
        return self.steps[first:]

    def burst(self, seconds: float, arriving: int, acceptance: float) -> list[Step]:
        """So many more seconds, at whose beginning so many come at once."""
        self.arriving = arriving
        end, first = self.now + seconds, len(self.steps)
        while self.now < end:
            self._step(np.full(len(self._contexts), acceptance))
        return self.steps[first:]

    def busy(self, seconds: float, running: int, acceptance: float) -> list[Step]:
        """So many more seconds, of as many requests as there are; each has its prompt read."""
        self.turnover = True
        self._resize(running - self.arriving)
        end, first = self.now + seconds, len(self.steps)
        while self.now < end:
            self._step(np.full(len(self._contexts), acceptance))
        return self.steps[first:]

    def _step(self, chances: np.ndarray) -> None:
        count = len(chances)
        prompt_tokens = 128 if self.prompts else 0
        if self.arriving:
            room = TOKEN_BUCKETS[-1] - count - round(count * self.adaptive.expected)
            prompt_tokens = min(room, self.arriving * PROMPT - self._read)
        slots = np.arange(count)
        decoding = Decoding(
            slots, self._contexts, np.minimum(8, np.maximum(0, self._left - 1)), self._missed.copy(), self._left
        )
        decision = self.adaptive.decide(decoding, prompt_tokens, self.now, self.arriving)
        if self._pending is not None:
            self.adaptive.observe(*self._pending)
        took = self.slowness * true_seconds(decision.shape, model=self.model)
        measured = took * (1.0 + self.noise * self._random.standard_normal()) + self.stall(self.now)
        self.now += measured
        draws = self._random.random((count, 9)) < chances[:, None]
        accepted = np.minimum(np.cumprod(draws, axis=1).sum(axis=1), decision.lengths)
        powers = chances[:, None] ** np.arange(9)
        expected = float((powers * (np.arange(9) <= decision.lengths[:, None])).sum())
        plain = StepShape(count + decision.shape.prompt_tokens, count, int(self._contexts.sum()))
        self.steps.append(
            Step(self.now, took, count, expected, count / true_seconds(plain), decision.lengths, decision)
        )
        self._pending = (slots, decision.lengths, accepted, decision.shape, measured, self.now)
        self._contexts = self._contexts + 1 + accepted
        self._left = self._left - 1 - accepted
        if self.model:
            read = self._missed - decision.reads
            self._missed = np.where(decision.lengths > 0, 0, read + 1)
        ended = np.flatnonzero(self._left <= 0)
        if self.turnover:
            for slot in ended.tolist():
                self.adaptive.forget(slot)
            for name in ("_contexts", "_missed", "_left"):
                setattr(self, name, np.delete(getattr(self, name), ended))
            count -= len(ended)
        else:
            self._replace(ended)
        if self.arriving:
            arrived, self._read = divmod(self._read + prompt_tokens, PROMPT)
            self.arriving -= arrived
            self._resize(count + arrived)
            self._missed[count:] = 0 if decision.follows else PROMPT
            if self.turnover:  # they have just begun
                self._contexts[count:], self._left[count:] = CONTEXT - OUTPUT // 2, self.output
        self.arriving += len(ended) if self.turnover else 0

    def _replace(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            self.adaptive.forget(slot)
        self._contexts[slots], self._left[slots], self._missed[slots] = CONTEXT - OUTPUT // 2, self.output, 0

    def _resize(self, running: int) -> None:
        have = len(self._contexts)
        for name in ("_contexts", "_missed", "_left"):
            values = getattr(self, name)
            setattr(self, name, np.concatenate([values, np.zeros(max(0, running - have), dtype=np.int64)])[:running])
        fresh = np.arange(have, running)
        self._replace(fresh)
        progress = self._random.integers(0, self.output, len(fresh))  # not all end at once
        self._contexts[fresh] += progress
        self._left[fresh] -= progress


def make_adaptive(*, model: bool = True, policy: Policy | None = None, slots: int = 256) -> Adaptive:
    policy = policy or Policy(num_speculative_tokens=8)
    return Adaptive(make_table(model=model), policy, max_concurrency=slots, reads_prompts=model)


def rate(steps: list[Step]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def changes(steps: list[Step]) -> int:
    """Of the mean draft length by half a token or more, probes and the ends of requests apart."""
    means = [
        float(step.lengths.mean()) for step in steps if step.lengths.max() == step.decision.turns or step.running > 4
    ]
    return sum(abs(a - b) >= 0.5 for a, b in pairwise(means))
