"""One request on its way through the engine: text as it is decided, usage, latencies, and one log line at its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from outrider_runtime.engine.client import RequestStream
from outrider_runtime.engine.detokenize import Detokenizer
from outrider_runtime.engine.messages import TokenDelta
from outrider_runtime.errors import RuntimeFault
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.server.answers import Usage
from outrider_runtime.server.service import Model, Service

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    finish_reason: str | None = None  # given with the last one


class Generation:
    """A context: entering submits the request, leaving before its end aborts it."""

    def __init__(
        self, service: Service, model: Model, prompt: tuple[int, ...], params: SamplingParams, arrival: float
    ) -> None:
        """`arrival` in monotonic seconds. Raises Unavailable when the queue is full, EngineDead."""
        self._service = service
        self.usage = Usage(len(prompt))
        self._detokenizer = Detokenizer(
            model.tokenizer.token_bytes,
            stop=params.stop,
            hidden=model.ready.eos_token_ids,
            min_tokens=params.min_tokens,
        )
        self._arrival = arrival
        self._last_token: float | None = None
        self._first_token_after: float | None = None
        self._outcome = "aborted"
        service.admit()
        self._stream: RequestStream = service.engine.submit(prompt, params)

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    def __enter__(self) -> Generation:
        self._service.enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stream.__exit__(kind, error, at)
        self._service.leave()
        if isinstance(error, asyncio.CancelledError | ConnectionError):
            self._outcome = "client gone"
        elif error is not None:
            self.failed(error)
        duration = time.monotonic() - self._arrival
        self._service.latencies.whole.observe(duration)
        log.info(
            "request ended",
            extra={
                "request_id": self.request_id,
                "outcome": self._outcome,
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "drafted": self.usage.drafted,
                "accepted": self.usage.accepted,
                "target_forwards": self.usage.target_forwards,
                "first_token_seconds": self._first_token_after and round(self._first_token_after, 4),
                "seconds": round(duration, 4),
            },
        )

    async def next(self) -> Piece:
        """The text decided since the last call; a backlog comes as one. Raises RuntimeFault when it cannot go on."""
        piece = self._decode(await self._stream.take())
        if piece.finish_reason is not None:
            self._outcome = piece.finish_reason
        return piece

    def failed(self, error: BaseException) -> None:
        self._outcome = f"error: {error}"

    def _decode(self, deltas: Sequence[TokenDelta]) -> Piece:
        texts: list[str] = []
        tokens = 0
        finish: str | None = None
        for delta in deltas:
            if delta.finish_reason in ("error", "abort"):
                raise RuntimeFault(delta.error or "the engine gave the request up")
            decoded = self._detokenizer.add(delta.token_ids)
            tokens += decoded.tokens
            texts.append(decoded.text)
            self._count(delta, decoded.tokens)
            if decoded.stopped or delta.finish_reason is not None:
                finish = "stop" if decoded.stopped else delta.finish_reason
                texts.append("" if decoded.stopped else self._detokenizer.finish())
                break
        self._time(tokens)
        return Piece("".join(texts), finish)

    def _count(self, delta: TokenDelta, kept: int) -> None:
        if delta.cached_tokens is not None:
            self.usage.cached_tokens = delta.cached_tokens
        self.usage.completion_tokens += kept
        self.usage.drafted += delta.drafted
        self.usage.accepted += min(delta.accepted, kept)
        self.usage.target_forwards += 1 if delta.token_ids else 0

    def _time(self, tokens: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        if self._last_token is None:
            self._first_token_after = now - self._arrival
            self._service.latencies.first_token.observe(self._first_token_after)
        else:
            self._service.latencies.inter_token.observe((now - self._last_token) / tokens, tokens)
        self._last_token = now
