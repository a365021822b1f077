"""The real applications over a fake engine, on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from tests.runtime.folders import tokenizer
from tests.runtime.server.fake_engine import READY, EngineThread, FakeEngine

from outrider_runtime.config import SchedulerConfig, ServerConfig
from outrider_runtime.engine.client import EngineClient
from outrider_runtime.engine.messages import Ready
from outrider_runtime.server import admin, app
from outrider_runtime.server.service import Service, load_model
from outrider_runtime.speculation.policy import Policy

MODEL = "tiny"


@dataclass
class Served:
    service: Service
    engine: FakeEngine
    thread: EngineThread
    api: TestClient
    admin: TestClient

    @property
    def text_of(self) -> Callable[[list[int]], str]:
        return lambda ids: self.service.model.tokenizer.token_bytes.join(ids).decode(errors="replace")

    def ids_of(self, text: str) -> list[int]:
        return list(self.service.model.tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory) -> Path:
    """tokenizer.json and a chat template, without weights."""
    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
async def serve(tiny_tokenizer_dir: Path) -> AsyncIterator[Callable]:
    """serve(engine=…, config=…, …) -> Served; everything is taken down after the test."""
    async with AsyncExitStack() as stack:

        async def start(
            engine: FakeEngine | None = None,
            *,
            ready: Ready = READY,
            policy: Policy | None = None,
            scheduler: SchedulerConfig | None = None,
            loaded: bool = True,
            **config: object,
        ) -> Served:
            engine = engine or FakeEngine()
            ready = replace(ready, tokenizer_path=str(tiny_tokenizer_dir))
            thread = EngineThread(engine, ready)
            stack.callback(thread.join)
            client = EngineClient(thread.channel)
            stack.push_async_callback(client.close)
            service = Service(
                ServerConfig(MODEL, host="127.0.0.1", **config),
                scheduler or SchedulerConfig(),
                client,
                policy or Policy(),
            )
            if loaded:
                service.model = load_model(await client.ready)
                client.stats = engine.stats()
            clients = []
            for build in (app.application, admin.application):
                clients.append(await stack.enter_async_context(TestClient(TestServer(build(service)))))
            return Served(service, engine, thread, *clients)

        yield start


@pytest.fixture
async def served(serve: Callable) -> Served:
    return await serve()
