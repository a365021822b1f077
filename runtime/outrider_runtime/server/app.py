"""The API port: OpenAI's completions, chat completions and models, and health."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from outrider_runtime.errors import BadRequest, EngineDead, RuntimeFault, Unavailable
from outrider_runtime.server import openai
from outrider_runtime.server.admin_token import bears
from outrider_runtime.server.answers import Chunks, Envelope, Kind, error_body, error_status
from outrider_runtime.server.generation import Generation
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
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        return _error(BadRequest(message, code="unknown_url", status=error.status))
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
    """Nobody while draining; under /v1 only who has the API key."""
    service = request.app[_SERVICE]
    if service.draining:
        raise Unavailable("the server is shutting down; try again, another replica will answer", "server_shutdown")
    key = service.config.api_key
    if key and request.path.startswith("/v1/") and not bears(request.headers.get("Authorization"), key.encode()):
        raise BadRequest("the API key is missing or wrong; send it as a bearer token", None, "invalid_api_key", 401)
    response: web.StreamResponse = await handler(request)
    return response


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
    if max(prompt) >= model.ready.vocab_size:
        last = model.ready.vocab_size - 1
        raise BadRequest(f"prompt has token id {max(prompt)}; this model's go to {last}", "prompt", "invalid_value")
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
    params = asked.sampling_params(len(prompt), model.ready.max_model_len)
    with Generation(request.app[_SERVICE], model, prompt, params, arrival) as generation:
        envelope = Envelope(kind, generation.request_id, asked.model)
        if asked.stream:
            return await stream(request, generation, Chunks(envelope, include_usage=asked.include_usage))
        text = ""
        while True:
            piece = await generation.next()
            text += piece.text
            if piece.finish_reason is not None:
                return web.json_response(envelope.answer(text, piece.finish_reason, generation.usage))


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
    if service.engine.died.done():
        raise EngineDead(service.engine.died.result())
    return web.json_response({"status": "ok"})
