"""The API server as the operator uses it, and the only file that imports a Kubernetes client.

`Kube` is the seam: tests wrap or replace it to inject faults. The client library reads kubeconfigs and logs in; bodies
stay plain dicts, since its models refuse or drop fields they do not know and cost more than the request.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol
from urllib.parse import urlencode
from urllib.request import getproxies

import aiohttp
from kubernetes.aio import config as kubeconfig
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from outrider_operator import labels
from outrider_operator.errors import Conflict, NotFound, OutriderError, Rejected, Unavailable
from outrider_operator.kinds import KINDS

Body = Mapping[str, Any]
Observer = Callable[[str, str, str, float], None]  # verb, kind, HTTP status or "error", seconds

PAGE = 250  # objects; a page of Deployments is then a few megabytes at most
_APPLY = "application/apply-patch+yaml"
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Page:
    items: list[dict[str, Any]]
    version: int  # resource version of the whole list; comparable (KEP-5504)


class Kube(Protocol):
    """All of it raises NotFound, Conflict, Unavailable or Rejected, and nothing else."""

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]: ...

    async def peek(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        """The same from the API server's memory: spares it a read of etcd, and may be behind by some milliseconds."""
        ...

    def pages(self, kind: str, namespace: str | None) -> AsyncIterator[Page]:
        """All objects of the kind that carry its selector, of one moment, in pages."""
        ...

    async def create(self, body: Body) -> dict[str, Any]: ...

    async def apply(self, body: Body) -> dict[str, Any]:
        """Server-side apply of the whole of what we own in it, by force."""
        ...

    async def overwrite(self, body: Body) -> dict[str, Any]:
        """Merge patch: lists become what they are in the body, whoever owns their items."""
        ...

    async def apply_status(self, body: Body) -> dict[str, Any]: ...

    async def update(self, body: Body) -> dict[str, Any]:
        """Replace; Conflict unless the body's resourceVersion is the current one."""
        ...

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Of that one object only: Conflict if another has taken its name."""
        ...


@dataclass(frozen=True, slots=True)
class Credentials:
    """What another client needs to log in as we do."""

    server: str
    ca_file: str | None
    insecure: bool
    authorization: str  # header, or empty
    certificate_file: str | None
    key_file: str | None


async def load(config_file: str = "", context: str = "") -> Configuration:
    """The named kubeconfig, else the pod's own account, else KUBECONFIG or ~/.kube/config. Raises OutriderError."""
    configuration = Configuration()
    try:
        if not config_file and not context and "KUBERNETES_SERVICE_HOST" in os.environ:
            kubeconfig.load_incluster_config(client_configuration=configuration)
        else:
            await kubeconfig.load_kube_config(
                config_file=config_file or None, context=context or None, client_configuration=configuration
            )
    except (kubeconfig.ConfigException, OSError) as error:
        raise OutriderError(f"no way to log in to a cluster: {error}; give --kubeconfig or run in a pod") from error
    return configuration


class Client:
    """`Kube` over HTTP."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        timeout: float = 15,
        connections: int = 32,
        observer: Observer | None = None,
    ) -> None:
        self._configuration, self._connections = configuration, connections
        self._ssl = RESTClientObject(configuration).ssl_context
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._observer = observer or (lambda verb, kind, status, seconds: None)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def credentials(self) -> Credentials:
        configuration = self._configuration
        return Credentials(
            server=configuration.host,
            ca_file=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            authorization=await self._authorization(),
            certificate_file=configuration.cert_file,
            key_file=configuration.key_file,
        )

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        return await self._request("get", kind, KINDS[kind].path(namespace, name))

    async def peek(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        return await self._request("get", kind, KINDS[kind].path(namespace, name), {"resourceVersion": "0"})

    async def pages(self, kind: str, namespace: str | None) -> AsyncIterator[Page]:
        resource = KINDS[kind]
        query: dict[str, str] = {"limit": str(PAGE)} | (
            {"labelSelector": resource.selector} if resource.selector else {}
        )
        while True:
            answer = await self._request("list", kind, resource.path(namespace), query)
            items = answer.get("items") or []
            for item in items:  # the API server leaves these two out in lists
                item["apiVersion"], item["kind"] = resource.api_version, kind
            yield Page(items, int(answer["metadata"]["resourceVersion"]))
            following = answer["metadata"].get("continue")
            if not following:
                return
            query["continue"] = following

    async def create(self, body: Body) -> dict[str, Any]:
        kind = body["kind"]
        path = KINDS[kind].path(body["metadata"]["namespace"])
        return await self._request("create", kind, path, {"fieldManager": labels.FIELD_MANAGER}, body)

    async def apply(self, body: Body) -> dict[str, Any]:
        return await self._apply("apply", body, "")

    async def apply_status(self, body: Body) -> dict[str, Any]:
        return await self._apply("apply_status", body, "/status")

    async def overwrite(self, body: Body) -> dict[str, Any]:
        # by another manager: one that both applies and updates keeps fields that it no longer applies
        kind, metadata = body["kind"], body["metadata"]
        path = KINDS[kind].path(metadata["namespace"], metadata["name"])
        return await self._request("overwrite", kind, path, {"fieldManager": labels.REPAIR_MANAGER}, body)

    async def update(self, body: Body) -> dict[str, Any]:
        kind, metadata = body["kind"], body["metadata"]
        path = KINDS[kind].path(metadata["namespace"], metadata["name"])
        return await self._request("update", kind, path, {"fieldManager": labels.FIELD_MANAGER}, body)

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        await self._request("delete", kind, KINDS[kind].path(namespace, name), body=options)

    async def _apply(self, verb: str, body: Body, subresource: str) -> dict[str, Any]:
        kind, metadata = body["kind"], body["metadata"]
        path = KINDS[kind].path(metadata["namespace"], metadata["name"]) + subresource
        # apply refuses unknown fields by itself, and parses twice as often to warn of doubled ones, which JSON has not
        query = {"fieldManager": labels.FIELD_MANAGER, "force": "true", "fieldValidation": "Ignore"}
        return await self._request(verb, kind, path, query, body)

    async def _request(
        self, verb: str, kind: str, path: str, query: Mapping[str, str] | None = None, body: Body | None = None
    ) -> dict[str, Any]:
        url = self._configuration.host + path + (f"?{urlencode(query)}" if query else "")
        method, content_type = _METHODS[verb]
        # to pack and unpack long answers costs both sides more than to send them
        headers = {"Content-Type": content_type, "Accept": _JSON, "Accept-Encoding": "identity"}
        sent = None if body is None else json.dumps(body)
        started, outcome = monotonic(), "error"
        try:
            if authorization := await self._authorization():
                headers["Authorization"] = authorization
            async with self._connected().request(
                method, url, headers=headers, data=sent, server_hostname=self._configuration.tls_server_name
            ) as response:
                data = await response.read()
            outcome = str(response.status)
            answer = json.loads(data) if response.status < 300 else {}
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{verb} {kind}: {type(error).__name__}: {error}") from error
        finally:
            self._observer(verb, kind, outcome, monotonic() - started)
        if response.status >= 300:
            raise failure(verb, f"{verb} {kind} {path}", response.status, data, response.headers.get("Retry-After"))
        return dict(answer)

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:  # not before there is a loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, ssl=self._ssl),
                timeout=self._timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                proxy=self._configuration.proxy,
                # looking for proxies costs two hops to a thread for each request: done only where there are any
                trust_env=bool(getproxies()),
            )
        return self._session

    async def _authorization(self) -> str:
        configuration = self._configuration
        token = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            return token if " " in token else f"Bearer {token}"
        if configuration.username:
            return aiohttp.encode_basic_auth(configuration.username, configuration.password or "")
        return ""


_METHODS = {
    "get": ("GET", _JSON),
    "list": ("GET", _JSON),
    "create": ("POST", _JSON),
    "apply": ("PATCH", _APPLY),
    "apply_status": ("PATCH", _APPLY),
    "overwrite": ("PATCH", "application/merge-patch+json"),
    "update": ("PUT", _JSON),
    "delete": ("DELETE", _JSON),
}


def failure(verb: str, what: str, status: int, data: bytes | str, retry_after: str | None) -> OutriderError:
    """The exception for an answer that is not a success. A 500 on apply is mostly a body that the server cannot
    merge (an undeclared field, a key twice) and would fail for ever: it is Rejected, not Unavailable."""
    try:
        message = json.loads(data)["message"]
    except (ValueError, KeyError, TypeError):
        message = (data.decode(errors="replace") if isinstance(data, bytes) else data)[:200]
    text = f"{what}: {status} {message}"
    match status:
        case 404:
            return NotFound(text)
        case 403 if "because it is being terminated" in text:
            return NotFound(text)  # its namespace is about to be gone: no fault of what was sent
        case 409 | 410:
            return Conflict(text)
        case 500 if verb in ("apply", "apply_status"):
            return Rejected(text, status)
        case 401 | 408 | 429:
            return Unavailable(text, _seconds(retry_after))
        case _ if status >= 500:
            return Unavailable(text, _seconds(retry_after))
        case _:
            return Rejected(text, status)


def _seconds(retry_after: str | None) -> float | None:
    return float(retry_after) if retry_after and retry_after.isdigit() else None
