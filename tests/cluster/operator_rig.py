"""What the operator's tests on a real API server share: the operator in this process, a hand that plays the kubelet,
and runtimes that speak the admin contract on loopback addresses."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import itertools
import json
import random
import ssl
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from outrider_operator import program
from outrider_operator.clock import REAL, Clock
from outrider_operator.errors import Conflict, NotFound
from outrider_operator.kinds import KINDS
from outrider_operator.kube import Client, Kube, Page
from outrider_operator.settings import Settings

CONTRACT = Path(__file__).parents[1] / "contract" / "speculation" / "get-active.json"
CHILDREN = (
    ("Secret", "{}-admin"),
    ("ConfigMap", "{}-policy"),
    ("Deployment", "{}"),
    ("Service", "{}"),
    ("PodDisruptionBudget", "{}"),
)
SYSTEM = "outrider-system"  # the namespace of manifests/install
ADMIN_PORT = 8001
CLOSING = 0.1  # seconds that TLS connections get to say goodbye before their loop is closed
# a loopback network of this run's own: runs side by side must not share the admin port of an address
_addresses = (f"127.{random.randint(1, 250)}.{random.randint(0, 250)}.{n}" for n in itertools.cycle(range(1, 250)))


async def eventually(holds: Callable[[], Awaitable[Any]], what: str, seconds: float = 60) -> Any:
    """The first truthy answer. A failure says what was waited for, and what it looked like last."""
    deadline = time.monotonic() + seconds
    while True:
        answer = await holds()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.05)


def smallest(name: str = "llama", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeModel",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "pvc://models/tiny"}, "engine": {"device": "CPU"}} | spec,
    }


class Faults:
    """Stands between the operator and the API server: `before` and `after` each request may raise or wait."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.calls: list[tuple[str, str, str]] = []
        self.frozen = False
        self.before: Callable[[str, str, str], Awaitable[None]] | None = None
        self.after: Callable[[str, str, str], Awaitable[None]] | None = None

    @property
    def writes(self) -> list[tuple[str, str, str]]:
        return [call for call in self.calls if call[0] not in ("get", "list") and call[1] != "Lease"]

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        return await self._through("get", kind, name, self._kube.get(kind, namespace, name))

    async def peek(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        return await self._through("get", kind, name, self._kube.peek(kind, namespace, name))

    async def pages(self, kind: str, namespace: str | None) -> AsyncIterator[Page]:
        if self.before:
            await self.before("list", kind, "")
        async for page in self._kube.pages(kind, namespace):
            yield page

    async def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._through("create", body["kind"], body["metadata"]["name"], self._kube.create(body))

    async def apply(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._through("apply", body["kind"], body["metadata"]["name"], self._kube.apply(body))

    async def overwrite(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._through("overwrite", body["kind"], body["metadata"]["name"], self._kube.overwrite(body))

    async def apply_status(self, body: Mapping[str, Any]) -> dict[str, Any]:
        request = self._kube.apply_status(body)
        return await self._through("apply_status", body["kind"], body["metadata"]["name"], request)

    async def update(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._through("update", body["kind"], body["metadata"]["name"], self._kube.update(body))

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        await self._through("delete", kind, name, self._kube.delete(kind, namespace, name, uid))

    async def _through(self, verb: str, kind: str, name: str, request: Awaitable[Any]) -> Any:
        try:
            if self.frozen:
                await asyncio.Event().wait()
            if self.before:
                await self.before(verb, kind, name)
        except BaseException:
            request.close()  # type: ignore[attr-defined]  # a coroutine that is not to run
            raise
        self.calls.append((verb, kind, name))
        answer = await request
        if self.after:
            await self.after(verb, kind, name)
        return answer


class Operator:
    """One life of the operator, in a thread and loop of its own: at its end kopf cancels every task of its loop."""

    def __init__(self, settings: Settings, clock: Clock = REAL) -> None:
        self._settings, self._clock = settings, clock
        self._watching = threading.Event()
        self._tell: Callable[[], object] = lambda: None
        self._ended: asyncio.Future[None]
        self.kube: Faults

    async def start(self, **hooks: Any) -> Operator:
        """Returns when it watches; hooks are those of Faults."""

        def wrap(kube: Kube) -> Kube:
            self.kube = Faults(kube)
            for name, hook in hooks.items():
                setattr(self.kube, name, hook)
            return self.kube

        async def live() -> None:
            loop, stop = asyncio.get_running_loop(), asyncio.Event()
            self._tell = lambda: loop.call_soon_threadsafe(stop.set)
            try:
                await program.run(self._settings, stop, wrap, self._watching.set, self._clock)
            finally:
                await asyncio.sleep(CLOSING)

        self._ended = asyncio.ensure_future(asyncio.to_thread(asyncio.run, live()))
        await eventually(self._is_watching, "the operator watches", 30)
        return self

    async def stop(self) -> None:
        """As SIGTERM does; raises what it ended with."""
        if not self._ended.done():
            self._tell()
        async with asyncio.timeout(30):
            await self._ended

    async def kill(self) -> None:
        """As SIGKILL looks to everybody else: from now on no request leaves, and nothing is finished."""
        self.kube.frozen = True
        await self.stop()

    async def end(self) -> BaseException | None:
        """Waits until it ends by itself; what it ended with."""
        async with asyncio.timeout(60):
            await asyncio.wait([self._ended])
        return self._ended.exception()

    async def _is_watching(self) -> bool:
        if self._ended.done():
            self._ended.result()
        return self._watching.is_set()


class Runtime:
    """A runtime's admin port: the contract's GET and PUT /v1/speculation, and counters that move with real time."""

    def __init__(self, token: str) -> None:
        self.address = next(_addresses)
        self.token = token
        self.running, self.waiting = 0.0, 0.0
        self.puts: list[dict[str, Any]] = []
        self.body: dict[str, Any] = copy.deepcopy(json.loads(CONTRACT.read_text())["response"]["body"])
        self.body["counters"] = dict.fromkeys(self.body["counters"], 0.0)
        self.acceptance = 0.6
        self._at = time.monotonic()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Runtime:
        application = web.Application()
        application.router.add_get("/v1/speculation", self._get)
        application.router.add_put("/v1/speculation", self._put)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.address, ADMIN_PORT).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner:
            await self._runner.cleanup()

    @property
    def policy(self) -> dict[str, Any]:
        return dict(self.body["policy"])

    def load_policy(self, config_map: Mapping[str, Any]) -> None:
        """What a pod reads at its start through configMapKeyRef."""
        self.body["policy"] = json.loads(config_map["data"]["policy"])

    def _advance(self) -> None:
        now, counters = time.monotonic(), self.body["counters"]
        passed, self._at = now - self._at, now
        drafting = self.body["policy"]["state"] == "Active" and self.running > 0
        tokens = 4 if drafting else 0
        steps = 20 * self.running * passed
        counters["uptime_seconds"] += passed
        counters["running_request_seconds"] += self.running * passed
        counters["waiting_request_seconds"] += self.waiting * passed
        if drafting:
            counters["drafts"] += steps
            counters["draft_tokens"] += steps * tokens
            counters["accepted_tokens"] += steps * tokens * self.acceptance
        counters["generated_tokens"] += steps * (1 + tokens * self.acceptance)
        state = self.body["policy"]["state"]
        self.body |= {"running": self.running, "waiting": self.waiting}
        self.body["effective"] |= {"state": state, "reason": self.body["policy"]["reason"], "tokens": tokens}

    async def _get(self, _: web.Request) -> web.Response:
        self._advance()
        return web.json_response(self.body)

    async def _put(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            error = {"field": "Authorization", "message": "PUT needs the admin token"}
            return web.json_response({"error": error}, status=401)
        self._advance()
        policy = await request.json()
        self.puts.append(policy)
        self.body["policy"] = policy
        self._advance()
        return web.json_response(self.body)


class Rig:
    """One namespace: its objects as an admin sees them, and the operators that watch it."""

    def __init__(self, client: Client, namespace: str, settings: Settings) -> None:
        self.client, self.namespace, self._settings = client, namespace, settings
        self._operators: list[Operator] = []
        self._has_account = False
        self._session: aiohttp.ClientSession | None = None

    async def operator(
        self, *, settings: Mapping[str, Any] | None = None, clock: Clock = REAL, **hooks: Any
    ) -> Operator:
        changed = self._settings.model_copy(update=dict(settings or {}))
        operator = Operator(changed, clock)
        self._operators.append(operator)
        return await operator.start(**hooks)

    async def close(self) -> None:
        for operator in self._operators:
            await operator.stop()
        if self._session:
            await self._session.close()
        await self.client.close()
        await asyncio.sleep(CLOSING)

    def forget(self, operator: Operator) -> None:
        """One that ended by itself, as it should."""
        self._operators.remove(operator)

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """As a user would: not with our field manager."""
        whole = {**body, "metadata": {**body["metadata"], "namespace": self.namespace}}
        return await self._write("POST", KINDS[body["kind"]].path(self.namespace), whole)

    async def get(self, kind: str, name: str) -> dict[str, Any] | None:
        try:
            return await self.client.get(kind, self.namespace, name)
        except NotFound:
            return None

    async def need(self, kind: str, name: str) -> dict[str, Any]:
        body = await self.get(kind, name)
        assert body is not None, f"there is no {kind} {name}"
        return body

    async def all(self, kind: str) -> list[dict[str, Any]]:
        return [item async for page in self.client.pages(kind, self.namespace) for item in page.items]

    async def edit(self, kind: str, name: str, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """As a user with kubectl edit would, again where the operator wrote in between."""
        path = KINDS[kind].path(self.namespace, name)
        while True:
            body = await self.need(kind, name)
            change(body)
            with contextlib.suppress(Conflict):
                return await self._write("PUT", path, body)

    async def set_status(self, kind: str, name: str, status: Mapping[str, Any]) -> dict[str, Any]:
        """As a controller or the kubelet would."""
        path = KINDS[kind].path(self.namespace, name) + "/status"
        return await self._write("PATCH", path, {"status": status}, "application/merge-patch+json")

    async def delete(self, kind: str, name: str) -> None:
        body = await self.need(kind, name)
        await self.client.delete(kind, self.namespace, name, body["metadata"]["uid"])

    async def status(self, name: str = "llama") -> dict[str, Any]:
        body = await self.get("SpeculativeModel", name)
        return dict((body or {}).get("status", {}))

    async def condition(self, kind: str, name: str = "llama") -> dict[str, Any]:
        conditions = (await self.status(name)).get("conditions", ())
        return next((dict(each) for each in conditions if each["type"] == kind), {})

    async def is_settled(self, name: str = "llama") -> bool:
        """All children are there, and status speaks of the spec as it is."""
        model = await self.need("SpeculativeModel", name)
        status = model.get("status", {})
        if not status.get("conditions") or status["observedGeneration"] != model["metadata"]["generation"]:
            return False
        return all([await self.get(kind, pattern.format(name)) is not None for kind, pattern in CHILDREN])

    async def versions(self) -> dict[str, str]:
        """Of everything that an operator writes, less its events."""
        kinds = ("SpeculativeModel", "Secret", "ConfigMap", "Deployment", "Service", "PodDisruptionBudget")
        return {
            f"{kind}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
            for kind in kinds
            for item in await self.all(kind)
            if item["metadata"]["name"] != "kube-root-ca.crt"
        }

    async def token(self, name: str = "llama") -> str:
        return base64.b64decode((await self.need("Secret", f"{name}-admin"))["data"]["token"]).decode()

    async def pod(self, name: str, ip: str, *, ready: bool = True, model: str = "llama") -> str:
        """A pod as the Deployment's ReplicaSet and the kubelet would make it."""
        if not self._has_account:  # every pod needs one, and nobody else is here to make it
            path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts"
            await self._write("POST", path, {"metadata": {"name": "default"}})
            self._has_account = True
        template = (await self.need("Deployment", model))["spec"]["template"]
        owner = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "name": f"{model}-1",
            "uid": str(uuid.uuid4()),
            "controller": True,
        }
        metadata = {"name": name, "labels": template["metadata"]["labels"], "ownerReferences": [owner]}
        spec = {"containers": [{"name": "server", "image": "none"}]}
        await self.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        await self.pod_status(name, ip, ready=ready)
        return name

    async def pod_status(self, name: str, ip: str, *, ready: bool) -> None:
        condition = {"type": "Ready", "status": "True" if ready else "False"}
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [condition]}
        await self.set_status("Pod", name, status)

    async def rolled_out(self, model: str = "llama", replicas: int = 1) -> None:
        """The Deployment's status when all its pods are new and ready."""
        deployment = await self.need("Deployment", model)
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        status: dict[str, Any] = dict.fromkeys(counts, replicas)
        await self.set_status(
            "Deployment", model, status | {"observedGeneration": deployment["metadata"]["generation"]}
        )

    async def events(self, name: str = "llama") -> list[str]:
        items = [item async for page in self.client.pages("Event", self.namespace) for item in page.items]
        return [item["reason"] for item in items if item.get("regarding", {}).get("name") == name]

    async def _write(self, method: str, path: str, body: Any, content_type: str = "application/json") -> dict[str, Any]:
        """Straight through, as somebody else: not with our field manager."""
        credentials = await self.client.credentials()
        context = ssl.create_default_context(cafile=credentials.ca_file)
        headers = {"Authorization": credentials.authorization, "Content-Type": content_type}
        data = json.dumps(body)
        if self._session is None:
            self._session = aiohttp.ClientSession()
        async with self._session.request(
            method, f"{credentials.server}{path}", data=data, headers=headers, ssl=context
        ) as answer:
            result = await answer.json()
            if result.get("reason") == "Conflict":
                raise Conflict(result["message"])
            assert answer.status < 300, result
            return dict(result)
