"""What travels between the HTTP process and the engine's process: at most one message per step each way.

Plain values, pickled over a socket (channel.py). What is made for every request in every step is a named tuple, and
a step's deltas travel as columns: both cost a fraction of pickled dataclasses. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import starmap
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.speculation.policy import Policy

FinishReason = Literal["stop", "length", "abort", "error"]


# -- to the engine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AddRequest:
    request_id: str
    prompt: tuple[int, ...]  # token ids, at least one
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class AbortRequest:
    request_id: str


@dataclass(frozen=True, slots=True)
class SetPolicy:
    policy: Policy


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


ToEngine = AddRequest | AbortRequest | SetPolicy | Shutdown


# -- from the engine -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What was loaded, for the admin port."""

    resolved_revision: str = ""
    parameters: int = 0
    dtype: str = ""  # as in the API: BFloat16, Float16, Float32


@dataclass(frozen=True, slots=True)
class DraftState:
    ok: bool
    reason: str = ""  # NotRequired, or a key of EXIT_CODES
    message: str = ""
    model: LoadedModel = field(default_factory=LoadedModel)


@dataclass(frozen=True, slots=True)
class Ready:
    """Sent once: the engine serves from now on. `tokenizer_path` is the folder the HTTP process loads it from."""

    tokenizer_path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_speculative_tokens: int
    model: LoadedModel
    draft: DraftState


@dataclass(frozen=True, slots=True)
class Progress:
    """While loading, for logs and /healthz."""

    message: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine will not start; the HTTP process writes the text and exits with the reason's code."""

    reason: str
    message: str


class TokenLogprobs(NamedTuple):
    """Of one generated token: its log-probability, and the likeliest tokens' in falling order, as (id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenDelta(NamedTuple):
    """New tokens of one request in one step, already verified and cut at EOS, stop ids and max_tokens.

    `drafted` and `accepted` are of this step. `cached_tokens` is given with the first delta: prompt tokens whose KV
    came from the prefix cache. `logprobs` has one entry per token where the request asked for them.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int | None = None
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Snapshot after a step. Counters only grow. `accepted_per_position[i]` counts drafts whose token i stood."""

    running: int = 0
    waiting: int = 0
    running_request_seconds: float = 0.0
    waiting_request_seconds: float = 0.0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    generated_tokens: int = 0
    prompt_tokens: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # of which found
    kv_cache_usage: float = 0.0  # share of blocks in use, 0 to 1
    effective_tokens: float = 0.0  # draft length in force (tests/contract/README.md)
    break_even_concurrency: int | None = None
    speedup: float | None = None

    def __reduce__(self) -> tuple[type[EngineStats], tuple[Any, ...]]:
        return EngineStats, _stats_fields(self)


_stats_fields: Callable[[EngineStats], tuple[Any, ...]] = attrgetter(*EngineStats.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class StepOutput:
    deltas: tuple[TokenDelta, ...]
    stats: EngineStats

    def __reduce__(self) -> tuple[Callable[..., StepOutput], tuple[Any, ...]]:
        return _from_columns, (self.stats, *zip(*self.deltas, strict=True))


def _from_columns(stats: EngineStats, *columns: tuple[Any, ...]) -> StepOutput:
    return StepOutput(tuple(starmap(TokenDelta, zip(*columns, strict=True))), stats)


@dataclass(frozen=True, slots=True)
class PolicyApplied:
    """Answer to SetPolicy, sent between two steps."""

    policy: Policy
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Crashed:
    """The last message of an engine that cannot go on, as errors.EngineDead; the traceback is in its log."""

    message: str
    reason: str = ""


FromEngine = Ready | Progress | Refused | StepOutput | PolicyApplied | Crashed
