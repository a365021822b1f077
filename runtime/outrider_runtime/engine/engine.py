"""The engine: requests in, tokens out, one step at a time. A step is schedule, run, postprocess."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch

from outrider_runtime.config import EngineConfig
from outrider_runtime.engine.calibration import Calibration
from outrider_runtime.engine.checks import check_params, check_prompt
from outrider_runtime.engine.messages import AddRequest, EngineStats, FinishReason, StepOutput, TokenDelta
from outrider_runtime.engine.reflex import Drafting, Reflex
from outrider_runtime.engine.request import Request
from outrider_runtime.engine.results import Outcome, Ticket
from outrider_runtime.engine.runner import Runner
from outrider_runtime.engine.scheduler import Chunk, Scheduler
from outrider_runtime.errors import BadRequest
from outrider_runtime.kv.prefix import PrefixCache
from outrider_runtime.models.causal import CausalLM, Weighted
from outrider_runtime.speculation.policy import Policy

if TYPE_CHECKING:
    from outrider_runtime.models.loader import Loaded


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was launched, and not read. `since` is the end of the one before it, if that was still out."""

    ticket: Ticket
    drafting: Drafting
    since: torch.cuda.Event | None
    host_seconds: float  # that the launch took

    def seconds(self) -> float | None:
        """From the end of the step before to its own; known once it is read, and None if there was a gap."""
        done = self.ticket.done
        if done is None:
            return self.host_seconds
        return None if self.since is None else 1e-3 * self.since.elapsed_time(done)


@dataclass(slots=True)
class _Counters:
    accepted_per_position: list[int]
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0


class Engine:
    """Not thread-safe: one thread adds, aborts, sets the policy and steps, in any order between two steps."""

    def __init__(
        self,
        config: EngineConfig,
        target: CausalLM,
        draft: Weighted | None = None,
        *,
        eos_token_ids: Collection[int] = (),
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        overlap: bool | None = None,
    ) -> None:
        """Modules are loaded and on their device. Without a draft, a method that needs one decodes plainly.

        `max_model_len` None is the config's, else the model's: prompt and generated tokens together. Raises
        ValueError when the config's blocks do not hold one request of that length (models/memory.py plans them), or
        its token budget not one token for each request. `overlap` launches a step before the last one's results are
        read: None is where there is a GPU to keep busy.
        """
        self.config = config
        self.policy = config.policy
        self.max_model_len = max_model_len or config.max_model_len or target.config.max_position_embeddings
        self._vocab_size = target.config.vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        num_blocks = config.cache.num_blocks
        if num_blocks is None or num_blocks * config.cache.block_size < self.max_model_len:
            raise ValueError(f"cache.num_blocks ({num_blocks}) must hold a context of {self.max_model_len} tokens")
        self._prefixes = PrefixCache(num_blocks, config.cache.prefix_caching)
        self._runner = Runner(
            config,
            target,
            draft,
            num_blocks=num_blocks,
            max_model_len=self.max_model_len,
            eos_token_ids=self._eos_token_ids,
        )
        self._scheduler = Scheduler(
            config.scheduler,
            self._prefixes,
            config.cache.block_size,
            self.max_model_len,
            clock,
            followed=self._runner.proposer is not None and self._runner.proposer.extends,
            draft_sizes=self._runner.draft_sizes,
        )
        self._reflex: Reflex | None = None
        self._calibration: Calibration | None = None
        if (proposer := self._runner.proposer) is not None:
            self._reflex = Reflex(self._runner, proposer, config.policy, self.max_model_len)
            cached_tokens = num_blocks * config.cache.block_size
            self._calibration = Calibration(self._reflex.table, self._runner, cached_tokens, self.max_model_len)
        self._flight: _Flight | None = None
        self._overlap = target.device.type == "cuda" if overlap is None else overlap
        self._requests: dict[str, Request] = {}
        self._counters = _Counters([0] * config.speculation.max_tokens)

    @classmethod
    def of(cls, config: EngineConfig, loaded: Loaded) -> Self:
        """Of models that were loaded for this configuration."""
        return cls(
            replace(config, cache=replace(config.cache, num_blocks=loaded.num_blocks)),
            loaded.target.module,
            loaded.draft.module if loaded.draft else None,
            eos_token_ids=loaded.eos_token_ids,
            max_model_len=loaded.max_model_len,
        )

    @property
    def has_work(self) -> bool:
        """Whether step() would do anything."""
        return bool(self._requests)

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises BadRequest: checks.py's, or the id is in use."""
        self._check(message)
        params = message.params
        request = Request(
            request_id=message.request_id,
            prompt_length=len(message.prompt),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            tokens=list(message.prompt),
            arrival=self._clock(),
        )
        self._requests[request.request_id] = request
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks; unknown or finished ones are ignored. No delta follows."""
        if (request := self._requests.get(request_id)) is not None:
            self._forget(request)

    def set_policy(self, policy: Policy) -> None:
        """In force from the next step on."""
        self.policy = policy
        if self._reflex is not None:
            self._reflex.set_policy(policy)

    def capture(self, report: Callable[[str], None]) -> None:
        """CUDA graphs of the steps that come first, and how long some take, before there are any; until then, what the
        policy allows is drafted whether it pays or not. `report` gets a line now and then."""
        self._runner.capture(self._allowed_tokens, report)
        if self._calibration is not None:
            self._calibration.begin()

    def idle(self) -> bool:
        """Make use of a moment without work: a fraction of a second. Whether another one would be of use."""
        if self._reflex is not None:
            self._reflex.idle(self._clock())
        if self._runner.idle():
            return True
        return self._calibration is not None and self._calibration.advance()

    def force_accepted_length(self, mean: float, *, shared: bool = False) -> None:
        """For benchmarks, before the first step: a step yields so many tokens on average, whatever the drafts are; to
        `shared`, as many to all texts of the same length."""
        self._runner.force_accepted_length(mean, shared=shared)

    def force_acceptance(self, chance: float) -> None:
        """For benchmarks, before the first step: each draft behind one that stands has this chance, whatever it is."""
        self._runner.force_acceptance(chance)

    def step(self) -> StepOutput:
        """Launch the next step, and read the last one's results (or its own, without overlap). No deltas while
        prompts are still read."""
        expected = None if self._reflex is None else self._reflex.expected
        last, early = self._flight, tuple[TokenDelta, ...]()
        idle = not self._scheduler.running  # since nobody knows when
        if self._awaits_results() and last is not None:
            self._flight, early = None, self._postprocess(last)
        follow = self._is_followed()
        chunks = self._scheduler.schedule(self._allowed_tokens, expected, follow=follow)
        launched = self._launch(chunks, None if idle else last, follow=follow) if chunks else None
        done = launched
        if self._overlap:
            done, self._flight = self._flight, launched
        return StepOutput((*early, *(self._postprocess(done) if done else ())), self.stats())

    def stats(self) -> EngineStats:
        """Counters, and the integrals up to now; cheap enough for every step."""
        scheduler, counters, pool = self._scheduler, self._counters, self._prefixes.pool
        scheduler.account()
        reflex, effective = self._reflex, None
        if reflex is not None and scheduler.running:
            effective = reflex.effective_tokens
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            running_request_seconds=scheduler.running_seconds,
            waiting_request_seconds=scheduler.waiting_seconds,
            drafts=counters.drafts,
            draft_tokens=counters.draft_tokens,
            accepted_tokens=counters.accepted_tokens,
            accepted_per_position=tuple(counters.accepted_per_position),
            generated_tokens=counters.generated_tokens,
            prompt_tokens=counters.prompt_tokens,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            kv_cache_usage=pool.used / pool.num_blocks,
            effective_tokens=float(self._allowed_tokens) if effective is None else effective,
            break_even_concurrency=None if reflex is None else reflex.break_even(self._clock()),
            speedup=None if reflex is None else reflex.adaptive.speedup(),
        )

    @property
    def _allowed_tokens(self) -> int:
        if self._runner.proposer is None:
            return 0
        return self.policy.allowed_tokens(self.config.speculation.max_tokens)

    def _awaits_results(self) -> bool:
        """Whether the launched step is read before the next one is launched."""
        proposer = self._runner.proposer
        allowed = self._flight is not None and self._allowed_tokens > 0
        return proposer is not None and proposer.awaits(self._flight.ticket.chunks if self._flight and allowed else ())

    def _is_followed(self) -> bool:
        """Whether a draft follows the next step, if it can any of its requests."""
        proposer, reflex, scheduler = self._runner.proposer, self._reflex, self._scheduler
        if proposer is None or reflex is None or not proposer.extends:
            return False
        now = self._clock()
        pays = reflex.pays(len(scheduler.running) + scheduler.arriving, now)
        return proposer.due(now, allowed=self._allowed_tokens > 0, pays=pays)

    def _launch(self, chunks: Sequence[Chunk], last: _Flight | None, *, follow: bool) -> _Flight:
        """`last` is the step before this one, read or not; None if there was a gap."""
        admitted, updates = self._scheduler.take_changes()
        for request in admitted:
            self._runner.admit(request)
        proposer, drafting = self._runner.proposer, Drafting()
        if self._reflex is not None:
            self._reflex.admit(admitted)
            drafting = self._reflex.decide(chunks, self._clock(), self._scheduler.arriving)
        if proposer is not None and drafting.turns:
            proposer.send(chunks)
        # A wait for results is in what it takes to draft, and not in what a step without drafts takes.
        counts = last is not None and (last is self._flight or drafting.turns > 0)
        since = last.ticket.done if last is not None and counts else None
        begin = self._clock()
        extend = follow and proposer is not None and any(proposer.follows(chunk) for chunk in chunks)
        ticket = self._runner.launch(chunks, updates, turns=drafting.turns, reads=drafting.reads, extend=extend)
        for chunk in ticket.chunks:
            chunk.request.flight = chunk
        return _Flight(ticket, drafting, since, self._clock() - begin)

    def _postprocess(self, flight: _Flight) -> tuple[TokenDelta, ...]:
        """Cut at the request's end, keep the KV of what stands, and let go of who has finished. What was computed
        for a request that has since left, or gave its blocks back, does not count."""
        deltas, verified = [], []
        ticket = flight.ticket
        for chunk, lease, outcome in zip(ticket.chunks, ticket.leases, ticket.result(), strict=True):
            request = chunk.request
            if request.slot is None or request.lease != lease:
                continue
            if request.flight is chunk:
                request.flight = None
            if not chunk.samples:
                request.computed = chunk.end
                self._scheduler.publish(request)
                continue
            if chunk.draft_length > 0:
                verified.append((request.slot, chunk.draft_length, outcome.accepted))
            delta = self._append(request, outcome)
            deltas.append(delta)
            self._scheduler.publish(request)
            if delta.finish_reason is not None:
                self._forget(request)
        if self._reflex is not None:
            self._reflex.observe(flight.drafting, ticket.chunks, verified, flight.seconds(), self._clock())
        return tuple(deltas)

    def _append(self, request: Request, outcome: Outcome) -> TokenDelta:
        end = len(request.tokens)
        emitted, finish_reason = request.cut(outcome.tokens, self._eos_token_ids, self.max_model_len)
        delta = self._delta(request, emitted, finish_reason, outcome)
        request.tokens += emitted
        request.computed = len(request.tokens) - 1  # the last one's KV is for the next step to write
        if self._runner.proposer is not None:
            self._runner.proposer.observe(request, end, outcome.drafted, outcome.accepted)
        return delta

    def _delta(
        self, request: Request, emitted: list[int], finish_reason: FinishReason | None, outcome: Outcome
    ) -> TokenDelta:
        """What the client gets of this step, counted. Called before the tokens are appended."""
        counters = self._counters
        first = request.generated == 0
        drafted, accepted = outcome.drafted, min(outcome.accepted, len(emitted))
        counters.prompt_tokens += request.prompt_length if first else 0
        counters.generated_tokens += len(emitted)
        counters.drafts += drafted > 0
        counters.draft_tokens += drafted
        counters.accepted_tokens += accepted
        for position in range(accepted):
            counters.accepted_per_position[position] += 1
        return TokenDelta(
            request_id=request.request_id,
            token_ids=tuple(emitted),
            finish_reason=finish_reason,
            drafted=drafted,
            accepted=accepted,
            cached_tokens=request.cached_tokens if first else None,
            logprobs=None if outcome.logprobs is None else outcome.logprobs[: len(emitted)],
        )

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        if self._runner.proposer is not None:
            self._runner.proposer.forget(request)
        self._scheduler.remove(request)

    def _check(self, message: AddRequest) -> None:
        if message.request_id in self._requests:
            raise BadRequest(f"request id {message.request_id} is in use")
        check_prompt(message.prompt, max_model_len=self.max_model_len, vocab_size=self._vocab_size)
        check_params(message.params, vocab_size=self._vocab_size)
