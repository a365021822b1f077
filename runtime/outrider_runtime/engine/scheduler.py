"""Which requests take part in the next step, with how many tokens, and in which blocks.

Decoding requests come first, one token and their drafts each, so that no prompt, however long, holds them up; what is
left of the token budget reads prompts in chunks, first come first served. When blocks run out, the latest request
gives its own back and is computed again later.

A step is scheduled while the one before may still run. What a request has got in that one is known only within bounds:
it drafts as if it had got least, and has blocks as if it had got most.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider_runtime.config import SchedulerConfig
from outrider_runtime.engine.feed import BlockUpdate
from outrider_runtime.engine.request import Request
from outrider_runtime.kv.prefix import Digest, PrefixCache, extend_chain


@dataclass(slots=True, eq=False)
class Chunk:
    """A request's share of a step: its tokens from `start` on, and `draft_length` drafted ones behind: as the scheduler
    makes it, the most there is room for, then what was decided.

    One that `decodes` (rather than reads) computes the text's last token, at `start` or, if drafts are out, later.
    """

    request: Request
    start: int
    length: int
    draft_length: int = 0
    decodes: bool = False
    samples: bool = False  # it reaches the request's last token, so that the step yields the next

    @property
    def end(self) -> int:
        return self.start + self.length


class Scheduler:
    """Owns the queue and the running set. Every request in `running` holds blocks, and only those do."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        block_size: int,
        max_model_len: int,
        clock: Callable[[], float],
        followed: bool = False,
        draft_sizes: Sequence[int] | None = None,
    ) -> None:
        """`followed`: a draft goes on from the target's hidden states, so that it needs that of the token before each
        chunk, and a place for its entry of the token behind. `draft_sizes` [turns]: of trees, where it drafts them."""
        if config.max_batched_tokens < config.max_concurrency:
            raise ValueError(
                f"max_batched_tokens ({config.max_batched_tokens}) must be at least max_concurrency "
                f"({config.max_concurrency}): every running request decodes one token a step"
            )
        self.running: list[Request] = []  # in order of admission
        self.waiting: deque[Request] = deque()
        self.running_seconds = 0.0  # integrals of the two lengths over time
        self.waiting_seconds = 0.0
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # of which found
        self._config = config
        self._cache = cache
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._clock = clock
        self._followed = int(followed)
        self._draft_sizes = draft_sizes
        self._last_change = clock()
        self._slots = list(range(config.max_concurrency - 1, -1, -1))  # free ones
        self._admitted: list[Request] = []
        self._updates: list[BlockUpdate] = []

    def add(self, request: Request) -> None:
        self.account()
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """It has ended, wherever it is; its blocks are free again, what they hold is kept where published."""
        self.account()
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._release(request)

    def schedule(self, draft_tokens: int, expected: float | None = None, *, follow: bool = False) -> list[Chunk]:
        """The next step, with at most `draft_tokens` drafted per request, one behind the other; prompts leave room for
        `expected` drafts of each on average, if it is given, else for all. `follow`: a draft is to go on from it. Empty
        only when there is nothing to do before the launched step's results are known."""
        self.account()
        decoding = [
            request for request in self.running if request.pending == 1 and request.room(self._max_model_len) > 0
        ]
        draft_tokens = self._affordable(self._drafts(draft_tokens), len(decoding))
        running = len(self.running)
        chunks = [chunk for request in decoding if (chunk := self._decode(request, draft_tokens))]
        preempted = len(self.running) < running
        drafts = sum(chunk.draft_length for chunk in chunks)
        if expected is not None:
            drafts = min(drafts, math.ceil(expected * len(chunks)))
        budget = self._config.max_batched_tokens - len(chunks) - drafts
        for request in self.running:
            if request.pending > 1 and budget > 0:
                chunks.append(self._read(request, budget))
                budget -= chunks[-1].length
        while budget > 0 and not preempted and self._admit(follow=follow):
            chunks.append(self._read(self.running[-1], budget))
            budget -= chunks[-1].length
        return chunks

    def take_changes(self) -> tuple[list[Request], list[BlockUpdate]]:
        """Requests admitted and blocks handed out since the last call."""
        changes = self._admitted, self._updates
        self._admitted, self._updates = [], []
        return changes

    def publish(self, request: Request) -> None:
        """Offer the blocks that the step has filled with verified tokens to later requests."""
        size = self._block_size
        extend_chain(request.chain, request.tokens, size, request.computed)
        followed = min(request.computed, request.draft_computed) // size
        for index in range(request.published, request.computed // size):
            self._cache.publish(request.blocks[index], request.chain[index], draft_valid=index < followed)
        for index in range(request.draft_published, followed):
            self._cache.mark_draft_valid(request.blocks[index])
        request.published, request.draft_published = request.computed // size, followed

    def account(self) -> None:
        """Bring the integrals up to now."""
        now = self._clock()
        self.running_seconds += len(self.running) * (now - self._last_change)
        self.waiting_seconds += len(self.waiting) * (now - self._last_change)
        self._last_change = now

    def _affordable(self, draft_tokens: int, decoding: int) -> int:
        """The draft length that leaves every decoding request its token, and prompts half of the budget."""
        if not decoding:
            return 0
        admits = bool(self.waiting) and len(self.running) < self._config.max_concurrency
        reading = admits or decoding < len(self.running)
        share = self._config.max_batched_tokens // (2 if reading else 1)
        return max(0, min(draft_tokens, share // decoding - 1))

    def _drafts(self, turns: int) -> int:
        return turns if self._draft_sizes is None else self._draft_sizes[min(turns, len(self._draft_sizes) - 1)]

    def _read(self, request: Request, budget: int) -> Chunk:
        start = len(request.tokens) - request.pending
        length = min(request.pending, budget)
        return Chunk(request, start, length, samples=length == request.pending)

    def _decode(self, request: Request, draft_tokens: int) -> Chunk | None:
        """One token and its drafts, in blocks taken from the latest requests if need be; None if it was one itself."""
        if not request.blocks:
            return None  # preempted for an earlier one
        while not self._grow(request, min(request.longest + self._followed, self._max_model_len)):
            latest = self.running[-1]
            self._preempt(latest)
            if latest is request:
                return None
        turns = request.room(self._max_model_len) - 1  # the target adds one of its own
        if request.params.speculative is not None:
            turns = min(turns, request.params.speculative)
        wanted = min(self._drafts(turns), draft_tokens)
        # Drafts may be refused: they never take the blocks that requests need to go on.
        end = min(request.longest + wanted + self._followed, self._max_model_len)
        if self._missing(request, end) <= self._spare:
            self._grow(request, end)
        # What has no place in them cannot stand (speculation/verify.py); behind what stands, a draft that follows needs
        # one more.
        end = request.longest + 1 if self._followed else request.shortest
        wanted = min(wanted, len(request.blocks) * self._block_size - end)
        return Chunk(request, request.shortest - 1, 1, max(0, wanted), decodes=True, samples=True)

    def _admit(self, *, follow: bool) -> bool:
        """Start the request that has waited longest, if blocks for all of its text are to be had, and no running one is
        about to publish what this one would compute again."""
        if not self.waiting or len(self.running) >= self._config.max_concurrency:
            return False
        request = self.waiting[0]
        length = len(request.tokens)
        reusable = (length - 1) // self._block_size  # the last token is computed in any case, for its logits
        extend_chain(request.chain, request.tokens, self._block_size, length)
        hit = self._cache.take(request.chain[:reusable])
        cached = len(hit.blocks)
        if follow and request.params.speculative != 0:
            # What the draft did not follow it cannot catch up on: better computed again, once.
            cached = hit.draft_blocks
            self._cache.pool.release(reversed(hit.blocks[cached:]))
        request.blocks = hit.blocks[:cached]
        if cached < reusable and self._is_being_read(request.chain[cached], cached):
            self._release(request)
            return False
        end = min(length + self._followed, self._max_model_len)
        if (self.running and self._missing(request, end) > self._spare) or not self._grow(request, end):
            self._release(request)
            return False
        request.computed = max(0, cached * self._block_size - self._followed)
        request.draft_computed = hit.draft_blocks * self._block_size
        request.published, request.draft_published = cached, hit.draft_blocks
        request.slot = self._slots.pop()
        request.lease += 1
        self._admitted.append(request)
        self._updates += [(request.slot, index, block) for index, block in enumerate(request.blocks)]
        if not request.admitted:
            request.admitted = True
            request.cached_tokens = cached * self._block_size
            self.prefix_queries += length
            self.prefix_hits += request.cached_tokens
        self.running.append(self.waiting.popleft())
        return True

    def _is_being_read(self, digest: Digest, index: int) -> bool:
        """Whether a running request computes the block of this digest, its `index`-th."""
        return self._cache.enabled and any(
            each.published <= index < len(each.chain) and each.chain[index] == digest for each in self.running
        )

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; what it has published may still be there when its turn comes."""
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._cache.pool.release(reversed(request.blocks))
        if request.slot is not None:
            self._slots.append(request.slot)
        request.slot, request.flight, request.blocks = None, None, []
        request.computed = request.draft_computed = request.published = request.draft_published = 0

    @property
    def arriving(self) -> int:
        """Waiting requests that there are slots for."""
        return min(len(self.waiting), self._config.max_concurrency - len(self.running))

    @property
    def _spare(self) -> int:
        """Blocks beyond the one that each running request may need next."""
        return self._cache.pool.available - len(self.running)

    def _missing(self, request: Request, length: int) -> int:
        return max(0, -(-length // self._block_size) - len(request.blocks))

    def _grow(self, request: Request, length: int) -> bool:
        """Blocks for `length` tokens, or nothing taken and False."""
        blocks = self._cache.pool.allocate(self._missing(request, length))
        if blocks is None:
            return False
        if request.slot is not None:  # else it is being admitted, and all of them are told then
            self._updates += [(request.slot, len(request.blocks) + index, block) for index, block in enumerate(blocks)]
        request.blocks = [*request.blocks, *blocks]
        return True
