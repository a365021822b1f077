"""A simulated pod: requests share its steps, queue for a place, and finish when their tokens are out. Exact between
events, so that hours take seconds and the counters are integrals as a runtime's are."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.fleet.costs import Costs, emitted

from outrider_runtime.speculation.policy import Policy, parse_policy

NO_DRAFT = {"ok": True, "reason": "NotRequired", "message": "", "resolvedRevision": "", "parameters": 0}
MODEL = {"resolvedRevision": "5e2f", "parameters": 134515008, "dtype": "Float32"}


@dataclass(slots=True)
class Request:
    """`waited` and `finished` are filled in as it goes; one that was turned away or gave up never finishes."""

    arrived: float
    tokens: int
    started: float | None = None
    finished: float | None = None
    gave_up: float | None = None


@dataclass
class Pod:
    """Times are seconds of whatever clock the caller keeps. It must be moved on by `advance`, never back."""

    now: float = 0.0
    costs: Costs = field(default_factory=Costs)
    acceptance: float = 0.7  # of each drafted token whose predecessors were accepted
    max_running: int = 64
    max_waiting: int = 64
    patience: float = 30.0  # seconds that a client waits for its first token
    max_tokens: int = 4
    reflex: bool = False  # whether it chooses the best draft length itself, up to the policy's
    policy: Policy = field(default_factory=Policy)
    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)
    draft: Mapping[str, Any] = field(default_factory=lambda: NO_DRAFT)
    measures_break_even: bool = True

    def __post_init__(self) -> None:
        self._began = self.now
        self._served = 0.0  # tokens that a request has got which was there from the beginning
        self._running: list[tuple[float, int, Request]] = []  # by what `_served` is when it finishes
        self._waiting: deque[Request] = deque()
        self._admitted = 0
        self.counters = dict.fromkeys(
            (
                "running_request_seconds",
                "waiting_request_seconds",
                "drafts",
                "draft_tokens",
                "accepted_tokens",
                "generated_tokens",
                "rejected_requests",
            ),
            0.0,
        )

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """The draft length in force."""
        allowed = self.policy.allowed_tokens(self.max_tokens) if self.draft["ok"] else 0
        if self.reflex and self.policy.mode == "Auto" and self._running:
            return self.costs.best(self.running, allowed, self.acceptance)
        return allowed

    def arrive(self, request: Request) -> bool:
        """Take a request that arrives now; False when it is turned away with 429."""
        if self.running < self.max_running:
            self._admit(request)
        elif self.waiting < self.max_waiting:
            self._waiting.append(request)
        else:
            self.counters["rejected_requests"] += 1
            return False
        return True

    def advance(self, to: float) -> None:
        """Serve until then."""
        while self.now < to:
            tokens = self.tokens
            rate = self.costs.rate(self.running, tokens, self.acceptance) if self._running else 0.0
            until = to
            if self._running:
                until = min(until, self.now + max(0.0, self._running[0][0] - self._served) / rate)
            if self._waiting:
                until = min(until, max(self.now, self._waiting[0].arrived + self.patience))
            self._serve(until - self.now, rate, tokens)
            self.now = until
            self._finish()

    def put(self, body: object) -> None:
        """Raises PolicyError naming the field."""
        self.policy = parse_policy(body)

    def body(self) -> dict[str, Any]:
        """What GET /v1/speculation answers."""
        policy, tokens = self.policy, self.tokens
        speedup = None
        if self._running:
            plain = self.costs.rate(self.running, 0, self.acceptance)
            speedup = round(self.costs.rate(self.running, tokens, self.acceptance) / plain, 2)
        return {
            "policy": policy.to_json(),
            "effective": {**self._effective(), "tokens": tokens, "maxTokens": self.max_tokens},
            "counters": {**self.counters, "uptime_seconds": self.now - self._began},
            "running": self.running,
            "waiting": self.waiting,
            "breakEvenConcurrency": self._break_even(),
            "speedup": speedup,
            "model": dict(self.model),
            "draft": dict(self.draft),
        }

    def _effective(self) -> dict[str, str]:
        policy, wanted = self.policy, self.policy.num_speculative_tokens
        if not self.draft["ok"]:
            return _say("Unavailable", "DraftUnavailable", self.draft["message"])
        if policy.mode == "Disabled" or policy.state == "Disabled":
            return _say("Disabled", policy.reason, "disabled by policy")
        if policy.state == "Suspended":
            return _say("Suspended", policy.reason, "suspended by policy")
        clamped = f"numSpeculativeTokens {wanted} is clamped to the {self.max_tokens} this runtime was started for"
        return _say("Active", policy.reason, clamped if wanted > self.max_tokens else "")

    def _break_even(self) -> int | None:
        if not self.measures_break_even or not self.draft["ok"]:
            return None
        length = min(self.policy.num_speculative_tokens, self.max_tokens)
        return self.costs.break_even(length, self.acceptance, self.max_running)

    def _admit(self, request: Request) -> None:
        request.started = self.now
        self._admitted += 1
        heapq.heappush(self._running, (self._served + request.tokens, self._admitted, request))

    def _serve(self, seconds: float, rate: float, tokens: int) -> None:
        counters, running = self.counters, self.running
        counters["running_request_seconds"] += running * seconds
        counters["waiting_request_seconds"] += self.waiting * seconds
        counters["generated_tokens"] += running * rate * seconds
        if running and tokens:
            drafts = running * seconds / self.costs.step(running, tokens)
            counters["drafts"] += drafts
            counters["draft_tokens"] += drafts * tokens
            counters["accepted_tokens"] += drafts * (emitted(tokens, self.acceptance) - 1)
        self._served += rate * seconds

    def _finish(self) -> None:
        while self._running and self._running[0][0] <= self._served + 1e-6:
            heapq.heappop(self._running)[2].finished = self.now
        while self._waiting and self.now - self._waiting[0].arrived >= self.patience - 1e-9:
            self._waiting.popleft().gave_up = self.now
        while self._waiting and self.running < self.max_running:
            self._admit(self._waiting.popleft())


def _say(state: str, reason: str, message: str) -> dict[str, str]:
    return {"state": state, "reason": reason, "message": message}
