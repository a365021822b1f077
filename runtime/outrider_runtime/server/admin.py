"""The admin port: health, metrics, and the speculation policy (the contract with the operator)."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from outrider_runtime import metrics
from outrider_runtime.engine.messages import DraftState, EngineStats, Ready
from outrider_runtime.errors import RuntimeFault, Unavailable
from outrider_runtime.server.admin_token import AdminToken
from outrider_runtime.server.service import Service
from outrider_runtime.speculation.policy import Policy, PolicyError, parse_policy

log = logging.getLogger(__name__)

_SERVICE = web.AppKey("service", Service)
_TOKEN = web.AppKey("token", AdminToken)


@dataclass(frozen=True, slots=True)
class Effective:
    """What is in force, which may be less than the policy asks for."""

    state: str
    reason: str
    message: str
    tokens: float
    max_tokens: int


def effective(policy: Policy, stats: EngineStats, draft: DraftState, max_tokens: int) -> Effective:
    if not draft.ok:
        return Effective("Unavailable", "DraftUnavailable", draft.message, 0, max_tokens)
    if policy.mode == "Disabled" or policy.state == "Disabled":
        return Effective("Disabled", policy.reason, "disabled by policy", 0, max_tokens)
    if policy.state == "Suspended":
        return Effective("Suspended", policy.reason, "suspended by policy", 0, max_tokens)
    allowed = policy.allowed_tokens(max_tokens)
    wanted = policy.num_speculative_tokens
    message = f"numSpeculativeTokens {wanted} is clamped to the {max_tokens} this runtime was started for"
    tokens = min(stats.effective_tokens, allowed) if stats.running else allowed
    return Effective("Active", policy.reason, message if wanted > max_tokens else "", tokens, max_tokens)


def view(policy: Policy, stats: EngineStats, ready: Ready, rejected: int, uptime: float) -> dict[str, Any]:
    """The body of GET /v1/speculation (tests/contract)."""
    now = effective(policy, stats, ready.draft, ready.max_speculative_tokens)
    return {
        "policy": policy.to_json(),
        "effective": {
            "state": now.state,
            "reason": now.reason,
            "message": now.message,
            "tokens": now.tokens,
            "maxTokens": now.max_tokens,
        },
        "counters": {
            "running_request_seconds": stats.running_request_seconds,
            "waiting_request_seconds": stats.waiting_request_seconds,
            "drafts": stats.drafts,
            "draft_tokens": stats.draft_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "generated_tokens": stats.generated_tokens,
            "rejected_requests": rejected,
            "uptime_seconds": uptime,
        },
        "running": stats.running,
        "waiting": stats.waiting,
        "breakEvenConcurrency": stats.break_even_concurrency,
        "speedup": stats.speedup,
        "model": {
            "resolvedRevision": ready.model.resolved_revision,
            "parameters": ready.model.parameters,
            "dtype": ready.model.dtype,
        },
        "draft": {
            "ok": ready.draft.ok,
            "reason": ready.draft.reason,
            "message": ready.draft.message,
            "resolvedRevision": ready.draft.model.resolved_revision,
            "parameters": ready.draft.model.parameters,
        },
    }


def application(service: Service) -> web.Application:
    app = web.Application(client_max_size=64 * 1024, middlewares=[_faults])
    app[_SERVICE] = service
    app[_TOKEN] = AdminToken(service.config.admin_token_file)
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/v1/speculation", _get)
    app.router.add_put("/v1/speculation", _put)
    return app


@web.middleware
async def _faults(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except Unavailable as fault:
        return _error(fault.status, "", fault.message)
    except RuntimeFault as fault:
        return _error(500, "", str(fault))
    except web.HTTPRequestEntityTooLarge as error:
        return _error(413, "", f"the body is too large: {error.text}")
    return response


def _error(status: int, field: str, message: str) -> web.Response:
    return web.json_response({"error": {"field": field, "message": message}}, status=status)


async def _healthz(request: web.Request) -> web.Response:
    """Alive, whether loading or serving; only a dead engine is not."""
    service = request.app[_SERVICE]
    if service.engine.died.done():
        return web.json_response({"status": "dead", "message": str(service.engine.died.result())}, status=500)
    if service.model is None:
        return web.json_response({"status": "loading", "message": service.engine.progress})
    return web.json_response({"status": "draining" if service.draining else "ok"})


async def _readyz(request: web.Request) -> web.Response:
    service = request.app[_SERVICE]
    return web.json_response({"ready": service.is_ready}, status=200 if service.is_ready else 503)


async def _metrics(request: web.Request) -> web.Response:
    service = request.app[_SERVICE]
    stats = service.engine.stats
    ready = service.loaded().ready
    now = effective(service.policy, stats, ready.draft, ready.max_speculative_tokens)
    snapshot = metrics.Snapshot(stats, now.state, now.reason, now.tokens, service.rejected, service.latencies)
    return web.Response(body=metrics.render(snapshot), headers={"Content-Type": metrics.CONTENT_TYPE})


def _view(service: Service) -> web.Response:
    uptime = round(time.monotonic() - service.started, 3)
    ready = service.loaded().ready
    return web.json_response(view(service.policy, service.engine.stats, ready, service.rejected, uptime))


async def _get(request: web.Request) -> web.Response:
    return _view(request.app[_SERVICE])


async def _put(request: web.Request) -> web.Response:
    service = request.app[_SERVICE]
    if not request.app[_TOKEN].allows(request.headers.get("Authorization")):
        return _error(401, "Authorization", "PUT /v1/speculation needs the admin token as a bearer token")
    service.loaded()
    try:
        policy = parse_policy(json.loads(await request.read()))
    except PolicyError as error:
        return _error(400, error.field, error.message)
    except (ValueError, RecursionError) as error:
        return _error(400, "", f"the body is not valid JSON: {error}")
    if policy != service.policy:
        log.info("policy set", extra={"before": service.policy.to_json(), "now": policy.to_json()})
    await service.engine.set_policy(policy)
    service.policy = policy
    return _view(service)
