from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from outrider_operator.errors import Conflict, NotFound, OutriderError, Rejected, Unavailable
from outrider_operator.kube import Client, failure, load


@pytest.mark.parametrize(
    ("verb", "status", "expected"),
    [
        ("get", 404, NotFound),
        ("apply", 404, NotFound),
        ("apply", 409, Conflict),
        ("delete", 409, Conflict),
        ("list", 410, Conflict),
        ("apply", 422, Rejected),
        ("apply", 400, Rejected),
        ("create", 403, Rejected),
        ("apply", 500, Rejected),
        ("apply_status", 500, Rejected),
        ("get", 500, Unavailable),
        ("create", 500, Unavailable),
        ("apply", 503, Unavailable),
        ("apply", 504, Unavailable),
        ("apply", 429, Unavailable),
        ("get", 401, Unavailable),
    ],
)
def test_answers_become_the_operators_own_errors(verb: str, status: int, expected: type[OutriderError]) -> None:
    error = failure(verb, f"{verb} Service", status, json.dumps({"message": "because"}).encode(), None)
    assert type(error) is expected
    assert "because" in str(error)


def test_a_namespace_that_ends_is_as_good_as_gone() -> None:
    message = 'services "llama" is forbidden: unable to create new content in namespace team because it is being '
    for verb in ("apply", "create"):
        data = json.dumps({"message": message + "terminated"}).encode()
        assert type(failure(verb, f"{verb} Service", 403, data, None)) is NotFound


def test_retry_after_is_carried_along() -> None:
    error = failure("get", "get Service", 429, b"{}", "7")
    assert isinstance(error, Unavailable)
    assert error.retry_after == 7


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b"\xff\xfe", b'{"message": 3}'])
def test_an_error_body_of_any_kind_is_survived(body: bytes) -> None:
    assert "503" in str(failure("get", "get Service", 503, body, "soon"))


class Server:
    """Answers what it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[web.Response] = []
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.asked.append((request.method, request.path_qs, dict(request.headers), json.loads(text) if text else None))
        return self.answers.pop(0)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    configuration = Configuration(host=server.url)
    configuration.api_key["BearerToken"] = "secret"
    client = Client(configuration, timeout=5)
    yield client
    await client.close()


SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "team", "name": "llama"}}


async def test_apply_is_server_side_forced_and_by_one_manager(server: Server, client: Client) -> None:
    server.answers.append(web.json_response(SERVICE))
    assert await client.apply(SERVICE) == SERVICE
    ((method, path, headers, body),) = server.asked
    assert method == "PATCH"
    assert path.startswith("/api/v1/namespaces/team/services/llama?fieldManager=outrider-operator&force=true")
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert headers["Authorization"] == "Bearer secret"
    assert body == SERVICE


async def test_status_goes_to_its_subresource(server: Server, client: Client) -> None:
    model = {"kind": "SpeculativeModel", "metadata": {"namespace": "team", "name": "llama"}, "status": {}}
    server.answers.append(web.json_response(model))
    await client.apply_status(model)
    assert server.asked[0][1].startswith("/apis/outrider.dev/v1alpha1/namespaces/team/speculativemodels/llama/status?")


async def test_a_deletion_names_the_very_object(server: Server, client: Client) -> None:
    server.answers.append(web.json_response({}))
    await client.delete("Service", "team", "llama", "u1")
    assert server.asked[0][0] == "DELETE"
    assert server.asked[0][3]["preconditions"] == {"uid": "u1"}


async def test_lists_come_in_pages_with_kind_and_version(server: Server, client: Client) -> None:
    first = {"metadata": {"resourceVersion": "10", "continue": "more"}, "items": [{"metadata": {"name": "a"}}]}
    second = {"metadata": {"resourceVersion": "10"}, "items": [{"metadata": {"name": "b"}}]}
    server.answers += [web.json_response(first), web.json_response(second)]
    pages = [page async for page in client.pages("Deployment", None)]
    assert [item["metadata"]["name"] for page in pages for item in page.items] == ["a", "b"]
    assert {item["kind"] for page in pages for item in page.items} == {"Deployment"}
    assert pages[0].version == 10
    assert "labelSelector=outrider.dev/model" in server.asked[0][1]
    assert "continue=more" in server.asked[1][1]


async def test_a_broken_body_is_no_answer(server: Server, client: Client) -> None:
    server.answers.append(web.Response(text="{", content_type="application/json"))
    with pytest.raises(Unavailable):
        await client.get("Service", "team", "llama")


async def test_a_server_that_is_away_is_unavailable() -> None:
    client = Client(Configuration(host="http://127.0.0.1:1"), timeout=5)
    with pytest.raises(Unavailable, match="get Service"):
        await client.get("Service", "team", "llama")
    await client.close()


async def test_every_request_is_observed(server: Server) -> None:
    seen: list[tuple[str, str, str]] = []
    client = Client(Configuration(host=server.url), observer=lambda *what: seen.append(what[:3]))
    server.answers += [web.json_response(SERVICE), web.json_response({"message": "no"}, status=404)]
    await client.get("Service", "team", "llama")
    with pytest.raises(NotFound):
        await client.get("Secret", "team", "llama")
    await client.close()
    assert seen == [("get", "Service", "200"), ("get", "Secret", "404")]


async def test_a_missing_kubeconfig_says_what_to_do(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(OutriderError, match="give --kubeconfig"):
        await load(str(tmp_path / "none"))


async def test_an_answer_that_takes_too_long_is_unavailable() -> None:
    async def never(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", never)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = Client(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"), timeout=0.1)
    with pytest.raises(Unavailable, match="Timeout"):
        await client.get("Service", "team", "llama")
    await client.close()
    await runner.cleanup()
