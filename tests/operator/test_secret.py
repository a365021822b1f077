from __future__ import annotations

import base64
from typing import Any

import pytest
from tests.operator.fake_kube import FakeKube

from outrider_operator.cache import Key
from outrider_operator.errors import NameConflict, Unavailable
from outrider_operator.observe import Model
from outrider_operator.secret import BOTH_VALID, LOOK_AGAIN, Tokens

KEY = Key("team", "llama")
MODEL = Model(namespace="team", name="llama", uid="u1", generation=1, spec=None)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Server(FakeKube):
    """Secrets are stored the way the API server does it."""

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        if given := body.pop("stringData", None):
            body["data"] = {name: base64.b64encode(value.encode()).decode() for name, value in given.items()}
        return super()._store(body)


@pytest.fixture
def kube() -> Server:
    return Server()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(kube: Server, clock: Clock) -> Tokens:
    return Tokens(kube, clock)


async def test_the_secret_is_made_once_with_a_random_token(kube: Server, tokens: Tokens) -> None:
    await tokens.ensure(MODEL, fresh=True)
    await tokens.ensure(MODEL, fresh=True)
    assert kube.calls == [("create", "Secret", "llama-admin")]
    (token,) = tokens.of(KEY)
    assert len(token) >= 32


async def test_two_models_have_two_tokens(tokens: Tokens) -> None:
    await tokens.ensure(MODEL, fresh=True)
    await tokens.ensure(Model(namespace="team", name="qwen", uid="u2", generation=1, spec=None), fresh=True)
    assert tokens.of(KEY) != tokens.of(Key("team", "qwen"))


async def test_after_a_restart_the_token_is_read_and_nothing_is_written(kube: Server, tokens: Tokens) -> None:
    await tokens.ensure(MODEL, fresh=True)
    again = Tokens(kube)
    await again.ensure(MODEL, fresh=False)
    assert again.of(KEY) == tokens.of(KEY)
    assert len(kube.writes) == 1


async def test_a_secret_that_a_crash_left_behind_is_used(kube: Server, tokens: Tokens) -> None:
    await tokens.ensure(MODEL, fresh=True)
    again = Tokens(kube)
    await again.ensure(MODEL, fresh=True)
    assert again.of(KEY) == tokens.of(KEY)


async def test_a_deleted_secret_is_made_anew_and_the_token_before_stays_valid_for_a_while(
    kube: Server, tokens: Tokens, clock: Clock
) -> None:
    await tokens.ensure(MODEL, fresh=True)
    (before,) = tokens.of(KEY)
    del kube.objects["Secret", "team", "llama-admin"]
    clock.now += LOOK_AGAIN
    await tokens.ensure(MODEL, fresh=False)
    newest, old = tokens.of(KEY)
    assert old == before
    assert newest != before
    clock.now += BOTH_VALID
    assert tokens.of(KEY) == (newest,)


async def test_a_token_that_pods_refuse_is_read_again_at_once(kube: Server, tokens: Tokens) -> None:
    await tokens.ensure(MODEL, fresh=True)
    del kube.objects["Secret", "team", "llama-admin"]
    tokens.doubt(KEY)
    await tokens.ensure(MODEL, fresh=False)
    assert len(tokens.of(KEY)) == 2


async def test_somebody_elses_secret_is_a_conflict_and_stays_as_it_is(kube: Server, tokens: Tokens) -> None:
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "llama-admin", "namespace": "team"}}
    before = kube.put({**theirs, "data": {"token": "eA=="}})
    with pytest.raises(NameConflict, match=r"Secret llama-admin \(not made by this operator\)"):
        await tokens.ensure(MODEL, fresh=True)
    assert kube.objects["Secret", "team", "llama-admin"] == before
    assert tokens.of(KEY) == ()


async def test_a_predecessors_secret_is_waited_for(tokens: Tokens) -> None:
    await tokens.ensure(MODEL, fresh=True)
    with pytest.raises(Unavailable, match="before"):
        await tokens.ensure(Model(namespace="team", name="llama", uid="u2", generation=1, spec=None), fresh=True)


async def test_a_forgotten_model_leaves_no_token(tokens: Tokens) -> None:
    await tokens.ensure(MODEL, fresh=True)
    tokens.forget(KEY)
    assert tokens.of(KEY) == ()


async def test_a_token_that_somebody_wrote_with_a_line_break_is_the_one_that_runtimes_read(
    kube: Server, tokens: Tokens
) -> None:
    await tokens.ensure(MODEL, fresh=True)
    secret = kube.objects["Secret", "team", "llama-admin"]
    secret["data"]["token"] = base64.b64encode(b"mine\n").decode()
    tokens.doubt(KEY)
    await tokens.ensure(MODEL, fresh=False)
    assert tokens.of(KEY)[0] == "mine"


async def test_a_token_that_is_no_text_stops_nothing_else(kube: Server, tokens: Tokens) -> None:
    await tokens.ensure(MODEL, fresh=True)
    kube.objects["Secret", "team", "llama-admin"]["data"]["token"] = base64.b64encode(b"\xff\xfe").decode()
    tokens.doubt(KEY)
    await tokens.ensure(MODEL, fresh=False)
    assert tokens.of(KEY)[0] != ""
