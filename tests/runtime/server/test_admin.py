"""The admin port keeps the contract with the operator, exchange by exchange."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runtime.server.fake_engine import READY, FakeEngine

from outrider_runtime.engine.messages import DraftState, EngineStats, LoadedModel
from outrider_runtime.server.admin_token import GRACE_SECONDS, AdminToken
from outrider_runtime.speculation.policy import Policy, parse_policy

FOLDER = Path(__file__).parents[2] / "contract" / "speculation"
EXCHANGES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
ANY_OK = EXCHANGES["get-active"]["response"]["body"]
POLICY = ANY_OK["policy"]


def _runtime_of(body):
    """The state a runtime must be in to give this answer: counters, what was loaded, and the policy before."""
    counters = {
        name: value for name, value in body["counters"].items() if name not in ("rejected_requests", "uptime_seconds")
    }
    stats = EngineStats(
        running=body["running"],
        waiting=body["waiting"],
        effective_tokens=4.0,
        break_even_concurrency=body["breakEvenConcurrency"],
        speedup=body["speedup"],
        **counters,
    )
    draft, model = body["draft"], body["model"]
    ready = replace(
        READY,
        max_speculative_tokens=body["effective"]["maxTokens"],
        model=LoadedModel(model["resolvedRevision"], model["parameters"], model["dtype"]),
        draft=DraftState(
            draft["ok"], draft["reason"], draft["message"], LoadedModel(draft["resolvedRevision"], draft["parameters"])
        ),
    )
    return stats, ready


@pytest.mark.parametrize("name", EXCHANGES)
async def test_the_exchange_of_the_contract_is_answered_as_written(name, serve, tmp_path):
    exchange = EXCHANGES[name]
    request, response = exchange["request"], exchange["response"]
    stats, ready = _runtime_of(response["body"] if response["status"] == 200 else ANY_OK)
    before = parse_policy(response["body"]["policy"] if request["method"] == "GET" else POLICY)
    token = tmp_path / "token"
    token.write_text("TOKEN\n")
    served = await serve(FakeEngine(base=stats), ready=ready, policy=before, admin_token_file=token)

    got = await served.admin.request(
        request["method"], request["path"], headers=request["headers"], json=request.get("body")
    )

    body = await got.json()
    assert got.status == response["status"]
    if got.status == 200:
        assert body["counters"].pop("uptime_seconds") >= 0
        expected = json.loads(json.dumps(response["body"]))
        del expected["counters"]["uptime_seconds"]
        assert body == expected
    else:
        assert body == response["body"]
    changed = request["method"] == "PUT" and response["status"] == 200
    assert served.engine.policies == ([parse_policy(request["body"])] if changed else [])


async def test_a_policy_that_was_put_is_what_get_shows(served):
    policy = {**POLICY, "state": "Suspended", "reason": "Saturated", "revision": "1"}
    assert (await served.admin.put("/v1/speculation", json=policy)).status == 200
    assert (await (await served.admin.get("/v1/speculation")).json())["policy"] == policy


async def test_while_nothing_runs_the_draft_length_in_force_is_what_the_policy_allows(serve):
    served = await serve(policy=Policy(num_speculative_tokens=3))
    assert (await (await served.admin.get("/v1/speculation")).json())["effective"]["tokens"] == 3


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 50_000])
async def test_a_put_that_is_no_policy_is_refused(served, body):
    got = await served.admin.put("/v1/speculation", data=body)
    assert got.status == 400
    assert set((await got.json())["error"]) == {"field", "message"}


async def test_a_put_of_a_megabyte_is_refused(served):
    got = await served.admin.put("/v1/speculation", data=b" " * 1_000_000)
    assert got.status == 413
    assert "large" in (await got.json())["error"]["message"]


async def test_while_loading_the_process_is_alive_and_not_ready(serve):
    served = await serve(loaded=False)
    assert (await served.admin.get("/healthz")).status == 200
    assert (await served.admin.get("/readyz")).status == 503
    got = await served.admin.get("/v1/speculation")
    assert got.status == 503
    assert "loading" in (await got.json())["error"]["message"]
    assert (await served.api.get("/health")).status == 503


async def test_once_loaded_it_is_ready_and_while_draining_no_more(served):
    assert (await served.admin.get("/readyz")).status == 200
    served.service.draining = True
    assert (await served.admin.get("/healthz")).status == 200
    assert (await served.admin.get("/readyz")).status == 503


async def test_a_dead_engine_fails_liveness(served):
    served.thread.kill()
    await served.service.engine.died
    assert (await served.admin.get("/healthz")).status == 500
    assert (await served.admin.get("/readyz")).status == 503


async def test_metrics_carry_the_engines_counters_and_the_state_of_speculation(serve):
    stats = EngineStats(drafts=7, draft_tokens=28, accepted_tokens=20, accepted_per_position=(7, 6), waiting=2)
    served = await serve(FakeEngine(base=stats), policy=Policy(state="Suspended", reason="Saturated"))
    text = await (await served.admin.get("/metrics")).text()
    for line in (
        "outrider:spec_decode_num_drafts_total 7.0",
        'outrider:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 6.0',
        "outrider:num_requests_waiting 2.0",
        "outrider:speculation_effective_tokens 0.0",
        'outrider:speculation_state{reason="Saturated",state="Suspended"} 1.0',
    ):
        assert line in text.splitlines()
    assert "speculation_speedup " not in text  # not known, so not said


class TestAdminToken:
    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "token"
        path.write_text("old\n")
        return path

    def test_old_and_new_are_valid_for_the_grace_after_a_change(self, path):
        now = 1000.0
        token = AdminToken(path, clock=lambda: now)
        path.write_text("new")
        assert token.allows("Bearer new")
        assert token.allows("Bearer old")
        now += GRACE_SECONDS
        assert not token.allows("Bearer old")
        assert token.allows("bearer new")

    def test_a_file_that_vanished_leaves_the_last_token_in_force(self, path):
        token = AdminToken(path)
        path.unlink()
        assert token.allows("Bearer old")
        assert not token.allows("Bearer ")

    @pytest.mark.parametrize("header", [None, "", "old", "Basic old", "Bearer", "Bearer  ", "Bearer olde", "Bearer é"])
    def test_anything_but_the_bearer_token_is_turned_away(self, path, header):
        assert not AdminToken(path).allows(header)

    def test_a_token_that_never_was_lets_nobody_in(self, tmp_path):
        assert not AdminToken(tmp_path / "none").allows("Bearer ")

    def test_without_a_file_configured_everybody_may(self):
        assert AdminToken(None).allows(None)
