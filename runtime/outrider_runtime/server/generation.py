"""One request on its way through the engine: its choices' text as it is decided, usage, latencies, one log line.

What arrives is turned to text and handed on where the engine's messages are read, in plain calls: waking a task for
each stream and step would cost more than all the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple, Protocol

from outrider_runtime.engine.client import RequestStream
from outrider_runtime.engine.detokenize import Detokenizer
from outrider_runtime.engine.messages import TokenDelta, TokenLogprobs
from outrider_runtime.errors import RuntimeFault
from outrider_runtime.metrics import Latencies
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.server.answers import Usage
from outrider_runtime.server.logprobs import Entries
from outrider_runtime.server.service import Model, Service

log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Of one choice."""

    text: str
    finish_reason: str | None = None  # given with the last one
    logprobs: Entries = ()


class Sink(Protocol):
    """Where the pieces go."""

    def take(self, index: int, piece: Piece) -> bool:
        """A piece of the choice `index`. Whether more may follow before ready() has been awaited."""

    async def ready(self) -> None:
        """Raises ConnectionError when nobody takes any more."""


class Choice:
    """One of the answers: its deltas turned to text, and counted."""

    def __init__(
        self, stream: RequestStream, model: Model, params: SamplingParams, latencies: Latencies, arrival: float
    ) -> None:
        self.stream = stream
        self.usage = Usage()
        self.finish_reason: str | None = None
        self.first_token_after: float | None = None  # seconds
        self._detokenizer = Detokenizer(
            model.tokenizer.token_bytes,
            stop=params.stop,
            hidden={*model.ready.eos_token_ids, *params.stop_token_ids},
            min_tokens=params.min_tokens,
        )
        self._latencies = latencies
        self._arrival = arrival
        self._last_token = 0.0

    def next(self) -> Piece | None:
        """What has been decided since the last call, if anything; a backlog comes as one. Raises RuntimeFault."""
        if self.finish_reason is not None:
            return None
        deltas = self.stream.take()
        if not deltas:
            if self.stream.fault is not None:
                raise self.stream.fault
            return None
        text = ""
        tokens = 0
        logprobs: list[tuple[int, TokenLogprobs]] = []
        for delta in deltas:
            if delta.finish_reason in ("error", "abort"):
                raise RuntimeFault(delta.error or "the engine gave the request up")
            decoded = self._detokenizer.add(delta.token_ids)
            text += decoded.text
            tokens += decoded.tokens
            self._count(delta, decoded.tokens)
            if delta.logprobs is not None:
                logprobs += zip(delta.token_ids[: decoded.tokens], delta.logprobs, strict=False)
            if decoded.stopped or delta.finish_reason is not None:
                self.finish_reason = "stop" if decoded.stopped else delta.finish_reason
                text += "" if decoded.stopped else self._detokenizer.finish()
                break
        if tokens:
            self._time(tokens)
        return Piece(text, self.finish_reason, logprobs)

    def _count(self, delta: TokenDelta, kept: int) -> None:
        usage = self.usage
        usage.completion_tokens += kept
        if delta.token_ids:
            usage.target_forwards += 1
        if delta.drafted:
            usage.drafted += delta.drafted
            usage.accepted += min(delta.accepted, kept)
        if delta.cached_tokens is not None:
            usage.cached_tokens = delta.cached_tokens

    def _time(self, tokens: int) -> None:
        now = time.monotonic()
        if self.first_token_after is None:
            self.first_token_after = now - self._arrival
            self._latencies.first_token.observe(self.first_token_after)
        else:
            self._latencies.inter_token.observe((now - self._last_token) / tokens, tokens)
        self._last_token = now


class Generation:
    """A context: leaving it aborts what has not ended."""

    def __init__(
        self,
        service: Service,
        model: Model,
        prompt: tuple[int, ...],
        choices: Sequence[SamplingParams],
        arrival: float,
    ) -> None:
        """Submits one engine request for each choice. `arrival` in monotonic seconds.

        Raises Unavailable when the queue is full, EngineDead.
        """
        self.request_id = uuid.uuid4().hex
        self._service = service
        self._prompt_tokens = len(prompt)
        self._arrival = arrival
        self._outcome = "aborted"
        self._sink: Sink | None = None  # None while nothing can be handed on
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fault: Exception | None = None
        self._choices: list[Choice] = []
        service.admit(len(choices))
        for index, params in enumerate(choices):
            request_id = self.request_id if len(choices) == 1 else f"{self.request_id}-{index}"
            stream = service.engine.submit(request_id, prompt, params, partial(self._hand_on, index))
            self._choices.append(Choice(stream, model, params, service.latencies, arrival))
        self._unfinished = len(choices)

    async def run(self, sink: Sink) -> None:
        """Hand on every piece until the last of all choices. Raises RuntimeFault when that cannot be."""
        while self._unfinished:
            self._turn = asyncio.get_running_loop().create_future()
            self._sink = sink
            for index in range(len(self._choices)):
                self._hand_on(index)
            await self._turn
            if self._fault is not None:
                raise self._fault
            if self._unfinished:
                await sink.ready()
        self._outcome = "+".join(sorted({choice.finish_reason or "" for choice in self._choices}))

    def _hand_on(self, index: int) -> None:
        """Called for a choice whenever something has come for it; waits in its stream while there is no sink."""
        sink = self._sink
        if sink is None:
            return
        choice = self._choices[index]
        try:
            while (piece := choice.next()) is not None:
                if piece.finish_reason is not None:
                    self._unfinished -= 1
                    self._service.engine.abort(choice.stream.request_id)  # of a stop string it knows nothing
                if not sink.take(index, piece) or not self._unfinished:
                    self._pause()
                    return
                if choice.stream.fault is None:
                    return
        except Exception as error:
            self._fault = error
            self._pause()

    def _pause(self) -> None:
        self._sink = None
        if not self._turn.done():  # cancelled, as the client has gone
            self._turn.set_result(None)

    @property
    def usage(self) -> Usage:
        """Of all choices; the prompt counts once."""
        total = Usage(self._prompt_tokens, cached_tokens=self._choices[0].usage.cached_tokens)
        for choice in self._choices:
            total.completion_tokens += choice.usage.completion_tokens
            total.drafted += choice.usage.drafted
            total.accepted += choice.usage.accepted
            total.target_forwards += choice.usage.target_forwards
        return total

    def failed(self, error: BaseException) -> None:
        self._outcome = f"error: {error}"

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._sink = None
        for choice in self._choices:
            self._service.engine.abort(choice.stream.request_id)
        if isinstance(error, asyncio.CancelledError | ConnectionError):
            self._outcome = "client gone"
        elif error is not None:
            self.failed(error)
        duration = time.monotonic() - self._arrival
        self._service.latencies.whole.observe(duration)
        first = min((c.first_token_after for c in self._choices if c.first_token_after is not None), default=None)
        usage = self.usage
        log.info(
            "request ended",
            extra={
                "request_id": self.request_id,
                "outcome": self._outcome,
                "choices": len(self._choices),
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
                "drafted": usage.drafted,
                "accepted": usage.accepted,
                "target_forwards": usage.target_forwards,
                "first_token_seconds": first and round(first, 4),
                "seconds": round(duration, 4),
            },
        )
