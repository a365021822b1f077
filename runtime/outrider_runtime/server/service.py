"""What the API and the admin port share: the engine, the loaded model, who is being served, and whether to go on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from outrider_runtime.config import SchedulerConfig, ServerConfig
from outrider_runtime.engine.client import EngineClient
from outrider_runtime.engine.messages import Ready
from outrider_runtime.errors import BadRequest, Unavailable
from outrider_runtime.metrics import Latencies
from outrider_runtime.server.chat import ChatTemplate, load_chat_template
from outrider_runtime.server.tokenizer import Tokenizer
from outrider_runtime.speculation.policy import Policy


@dataclass(frozen=True, slots=True)
class Model:
    """What the HTTP process knows of the served model."""

    ready: Ready
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    created: int  # Unix seconds


def load_model(ready: Ready) -> Model:
    """Raises Refusal(UnsupportedModel)."""
    folder = Path(ready.tokenizer_path)
    tokenizer = Tokenizer(folder)
    return Model(ready, tokenizer, load_chat_template(folder, tokenizer), int(time.time()))


@dataclass(slots=True)
class Service:
    config: ServerConfig
    scheduler: SchedulerConfig
    engine: EngineClient
    policy: Policy
    model: Model | None = None  # None while loading
    draining: bool = False
    rejected: int = 0
    latencies: Latencies = field(default_factory=Latencies)
    started: float = field(default_factory=time.monotonic)
    _active: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        return self.model is not None and not self.draining and not self.engine.died.done()

    def loaded(self) -> Model:
        """Raises Unavailable while loading."""
        if self.model is None:
            raise Unavailable(f"the model is loading: {self.engine.progress}", "model_loading", retry_after=5)
        return self.model

    def served(self, name: str) -> Model:
        """Raises BadRequest(model_not_found), or Unavailable while loading."""
        if name != self.config.served_model_name:
            raise BadRequest(
                f"the model {name!r} does not exist; this server serves {self.config.served_model_name!r}",
                "model",
                "model_not_found",
                404,
            )
        return self.loaded()

    def admit(self, count: int = 1) -> None:
        """So many engine requests. Raises Unavailable when the queue is full. Call right before submitting."""
        limit = self.scheduler.max_concurrency + self.scheduler.queue_limit
        if count > limit:
            raise BadRequest(f"n must be at most the {limit} requests this server takes; got {count}", "n")
        if self.engine.in_flight + count > limit:
            self.rejected += 1
            raise Unavailable(
                f"{limit} requests are running or waiting, the most this server takes; try again later",
                "rate_limit_exceeded",
                429,
                retry_after=1,
            )

    def enter(self) -> None:
        self._active += 1
        self._idle.clear()

    def leave(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._idle.set()

    async def idle(self, timeout: float) -> bool:
        """Whether every answer begun has ended, waiting at most `timeout` seconds for it."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True
