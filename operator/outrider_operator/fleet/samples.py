"""Measurements of the pods as values: what one GET /v1/speculation said, and a short history of it per pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Counters:
    """Monotonic since the runtime's start; they restart at 0 with it (uptime_seconds falls)."""

    running_request_seconds: float
    waiting_request_seconds: float
    drafts: float
    draft_tokens: float
    accepted_tokens: float
    generated_tokens: float
    rejected_requests: float
    uptime_seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of GET /v1/speculation, checked: finite, not negative, of the right types."""

    revision: str
    state: str
    reason: str
    message: str
    tokens: float
    max_tokens: int
    counters: Counters
    running: float
    waiting: float
    break_even_concurrency: int | None
    speedup: float | None
    model_revision: str
    model_parameters: int
    model_dtype: str
    draft_ok: bool
    draft_reason: str
    draft_message: str
    draft_revision: str
    draft_parameters: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One attempt to read one pod. `answer` is None when it failed, and `error` says why."""

    at: float  # monotonic seconds
    answer: Answer | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Samples by pod name, oldest first, as long as the longest window needs.

    `samples` are of the pods that are ready now. `gone` are of pods that no longer are: what they carried within the
    window still counts as past load, or a replaced pod would look like a fall in demand.
    """

    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    gone: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
