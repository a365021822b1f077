"""The API port: OpenAI's completions, chat completions and models, and health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from outrider_runtime.errors import BadRequest, RuntimeFault, Unavailable
from outrider_runtime.server import openai
from outrider_runtime.server.admin_token import bears
from outrider_runtime.server.answers import Choice, Chunks, Envelope, Kind, error_body, error_status
from outrider_runtime.server.generation import Generation, Piece
from outrider_runtime.server.logprobs import ChatLogprobs, CompletionLogprobs, Logprobs
from outrider_runtime.server.service import Model, Service
from outrider_runtime.server.stream import stream

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_CONNECTION_SECONDS = 60.0  # then the client must reconnect, and may reach a newer replica

_SERVICE = web.AppKey("service", Service)


def application(service: Service) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_faults, _gate])
    app[_SERVICE] = service
    app.router.add_post("/v1/completions", _completions)
    app.router.add_post("/v1/chat/completions", _chat_completions)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{name:.+}", _model)
    app.router.add_get("/health", _health)
    app.on_response_prepare.append(_ConnectionAge(service))
    return app


class _ConnectionAge:
    """Tells clients to reconnect: when draining, and on old connections."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._since: WeakKeyDictionary[asyncio.BaseTransport, float] = WeakKeyDictionary()

    async def __call__(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._service.draining or self._age(request.transport) > MAX_CONNECTION_SECONDS:
            response.force_close()
            response.headers["Connection"] = "close"

    def _age(self, connection: asyncio.BaseTransport | None) -> float:
        """Seconds since the connection's first request; none for one that is gone."""
        if connection is None:
            return 0.0
        now = time.monotonic()
        return now - self._since.setdefault(connection, now)


@web.middleware
async def _faults(request: web.Request, handler: Any) -> web.StreamResponse:
    """Every error as OpenAI's error object."""
    try:
        response: web.StreamResponse = await handler(request)
    except RuntimeFault as fault:
        return _error(fault)
    except web.HTTPRequestEntityTooLarge:
        message = f"the body has more than the {MAX_BODY_BYTES} bytes allowed; send less"
        return _error(BadRequest(message, code="request_too_large", status=413))
    except web.RequestPayloadError:
        message = "the body cannot be read; send it as its Content-Encoding and Transfer-Encoding say"
        return _error(BadRequest(message, code="invalid_body"))
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        response = _error(BadRequest(message, code="unknown_url", status=error.status))
        if "Allow" in error.headers:  # of 405: which methods there are
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        raise
    except Exception:
        log.exception("a request failed", extra={"path": request.path})
        return _error(RuntimeFault("the server failed; its log says why"))
    return response


def _error(fault: RuntimeFault) -> web.Response:
    response = web.json_response(error_body(fault), status=error_status(fault))
    if isinstance(fault, Unavailable) and fault.retry_after is not None:
        response.headers["Retry-After"] = str(fault.retry_after)
    if response.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


@web.middleware
async def _gate(request: web.Request, handler: Any) -> web.StreamResponse:
    """Nobody while draining or once the engine is dead; under /v1 only who has the API key."""
    service = request.app[_SERVICE]
    if service.engine.died.done():
        raise service.engine.died.result()
    if service.draining:
        raise Unavailable("the server is shutting down; try again, another replica will answer", "server_shutdown")
    key = service.config.api_key
    if key and request.path.startswith("/v1/") and not _has_key(request, key):
        raise BadRequest("the API key is missing or wrong; send it as a bearer token", None, "invalid_api_key", 401)
    service.enter()  # from here on a drain waits for it, also while its prompt is read and tokenized
    try:
        response: web.StreamResponse = await handler(request)
    finally:
        service.leave()
    return response


def _has_key(request: web.Request, key: str) -> bool:
    """Blanks around the key, like the newline that many Secrets end with, no header could bear."""
    return bears(request.headers.get("Authorization"), (key.strip() or key).encode())


async def _completions(request: web.Request) -> web.StreamResponse:
    arrival = time.monotonic()
    service = request.app[_SERVICE]
    asked = openai.parse_completion(await request.read())
    model = service.served(asked.model)
    if isinstance(asked.prompt, str):
        prompt = await asyncio.to_thread(model.tokenizer.encode, asked.prompt, add_special_tokens=True)
    else:
        prompt = asked.prompt
    if not prompt:
        raise BadRequest("prompt has no tokens; give at least one", "prompt", "invalid_value")
    return await _answer(request, "completion", model, asked, prompt, arrival)


async def _chat_completions(request: web.Request) -> web.StreamResponse:
    arrival = time.monotonic()
    service = request.app[_SERVICE]
    asked = openai.parse_chat(await request.read())
    model = service.served(asked.model)
    if model.chat_template is None:
        raise BadRequest("this model has no chat template; use /v1/completions", "messages", "unsupported_model")
    messages = [message.for_template() for message in asked.messages]
    prompt = await asyncio.to_thread(model.chat_template.encode, messages)
    if not prompt:
        raise BadRequest("messages make an empty prompt; say something", "messages", "invalid_value")
    return await _answer(request, "chat", model, asked, prompt, arrival)


async def _answer(
    request: web.Request,
    kind: Kind,
    model: Model,
    asked: openai.GenerationRequest,
    prompt: tuple[int, ...],
    arrival: float,
) -> web.StreamResponse:
    if max(prompt) >= model.ready.vocab_size:  # a tokenizer may know more of them
        field, last = "messages" if kind == "chat" else "prompt", model.ready.vocab_size - 1
        raise BadRequest(f"{field}: token id {max(prompt)}; this model's go to {last}", field, "invalid_value")
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    choices = asked.sampling_params(
        len(prompt), max_model_len=model.ready.max_model_len, vocab_size=model.ready.vocab_size, encode=encode
    )
    with Generation(request.app[_SERVICE], model, prompt, choices, arrival) as generation:
        envelope = Envelope(kind, generation.request_id, asked.model)
        logprobs = [_logprobs(kind, asked, model) for _ in choices]
        if asked.stream:
            usage = asked.include_usage
            chunks = [Chunks(envelope, i, include_usage=usage, logprobs=told) for i, told in enumerate(logprobs)]
            return await stream(request, generation, chunks)
        whole = _Whole(len(choices))
        await generation.run(whole)
        return web.json_response(envelope.answer(whole.choices(logprobs), generation.usage))


def _logprobs(kind: Kind, asked: openai.GenerationRequest, model: Model) -> Logprobs | None:
    if asked.num_logprobs() is None:
        return None
    return (ChatLogprobs if kind == "chat" else CompletionLogprobs)(model.tokenizer)


class _Whole:
    """A sink that collects."""

    def __init__(self, choices: int) -> None:
        self._pieces: list[list[Piece]] = [[] for _ in range(choices)]

    def take(self, index: int, piece: Piece) -> bool:
        self._pieces[index].append(piece)
        return True

    async def ready(self) -> None:
        pass

    def choices(self, logprobs: Sequence[Logprobs | None]) -> list[Choice]:
        return [
            Choice(
                "".join(piece.text for piece in pieces),
                pieces[-1].finish_reason,
                None if told is None else told.body([entry for piece in pieces for entry in piece.logprobs]),
            )
            for pieces, told in zip(self._pieces, logprobs, strict=True)
        ]


async def _models(request: web.Request) -> web.Response:
    service = request.app[_SERVICE]
    return web.json_response({"object": "list", "data": [_describe(service, service.loaded())]})


async def _model(request: web.Request) -> web.Response:
    service = request.app[_SERVICE]
    return web.json_response(_describe(service, service.served(request.match_info["name"])))


def _describe(service: Service, model: Model) -> dict[str, Any]:
    return {
        "id": service.config.served_model_name,
        "object": "model",
        "created": model.created,
        "owned_by": "outrider",
        "max_model_len": model.ready.max_model_len,
    }


async def _health(request: web.Request) -> web.Response:
    service = request.app[_SERVICE]
    service.loaded()
    return web.json_response({"status": "ok"})
