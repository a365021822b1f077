"""`outrider serve` as it runs in a pod: the real engine in its own process, a tiny model, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import openai
import pytest
from tests.interrupted import interrupt_import
from tests.runtime.server.running import MODEL, REPOSITORY, poll, serving

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "the road ahead the road ahead"}], "temperature": 0}
ENDLESS = {"ignore_eos": True}  # the answer then fills the context: some 470 tokens
POLICY = {
    "revision": "r1",
    "mode": "Auto",
    "state": "Suspended",
    "reason": "Saturated",
    "numSpeculativeTokens": 4,
    "minAcceptancePercent": None,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_model_dir):
    """With its own model as draft, so that nearly all is accepted; and that drafts, though it cannot pay."""
    draft = ("--draft-model", str(tiny_model_dir), "--max-concurrency", "4")
    policy = json.dumps({**POLICY, "mode": "Enabled", "state": "Active", "reason": ""})
    with serving(tmp_path_factory.mktemp("serve"), tiny_model_dir, *draft, OUTRIDER_POLICY=policy) as server:
        yield server.wait_ready()


def _text(stream) -> tuple[str, object]:
    text, usage = "", None
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    return text, usage


def test_a_stream_of_the_real_engine_says_what_plain_decoding_says_in_fewer_forwards(server):
    with server.client() as client:
        create = client.chat.completions.create
        options = {"include_usage": True}
        text, usage = _text(create(**ASK, max_tokens=40, stream=True, stream_options=options, extra_body=ENDLESS))
        plain = create(**ASK, max_tokens=40, extra_body={**ENDLESS, "speculative": False})
    assert plain.choices[0].message.content == text
    assert usage.completion_tokens == plain.usage.completion_tokens == 40
    assert usage.completion_tokens_details.accepted_prediction_tokens > 20
    assert usage.completion_tokens_details.target_forwards < 20
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert plain.usage.completion_tokens_details.target_forwards == 40
    assert plain.usage.prompt_tokens_details.cached_tokens > 0


def test_a_suspended_policy_stops_drafting(server):
    assert server.request("/v1/speculation", POLICY, "PUT")[0] == 200
    before = server.speculation()
    assert (before["effective"]["state"], before["effective"]["tokens"]) == ("Suspended", 0)
    with server.client() as client:
        client.chat.completions.create(**ASK, max_tokens=8)
    after = server.speculation()
    assert after["counters"]["drafts"] == before["counters"]["drafts"]
    assert after["counters"]["generated_tokens"] > before["counters"]["generated_tokens"]
    assert server.request("/v1/speculation", {**POLICY, "state": "Active", "reason": ""}, "PUT")[0] == 200


def test_a_client_that_leaves_gives_its_blocks_back(server):
    def usage() -> float:
        with socket.create_connection(("127.0.0.1", server.admin_port)) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        (line,) = [line for line in text.splitlines() if line.startswith("outrider:kv_cache_usage_perc ")]
        return float(line.split()[1])

    with server.client() as client:
        stream = client.chat.completions.create(**ASK, stream=True, extra_body={**ENDLESS, "speculative": False})
        next(iter(stream))
        assert usage() > 0
        stream.close()
    poll(lambda: server.speculation()["running"] == 0, 10, "no request runs")
    assert usage() == 0


def test_an_idle_engine_uses_no_processor(server):
    def ticks() -> int:
        return sum(map(int, Path(f"/proc/{server.child()}/stat").read_text().rpartition(")")[2].split()[11:13]))

    poll(lambda: server.speculation()["running"] == 0, 10, "no request runs")
    before = ticks()
    with pytest.raises(AssertionError, match="not within"):
        poll(lambda: ticks() - before > 5, 1.0, "50 ms of processor time")


def test_sigterm_lets_streams_finish_and_turns_new_requests_away(tmp_path, tiny_model_dir):
    with serving(tmp_path, tiny_model_dir) as server, server.client() as client:
        server.wait_ready()
        stream = iter(client.chat.completions.create(**ASK, stream=True, extra_body=ENDLESS))
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        poll(lambda: server.request("/readyz")[0] == 503, 10, "not ready")
        status, headers, body = server.request("/v1/chat/completions", ASK)
        assert (status, headers["Connection"], body["error"]["code"]) == (503, "close", "server_shutdown")
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert server.ended() == 0
    assert server.termination_log.read_text() == ""


def test_an_engine_killed_in_mid_stream_leaves_an_error_event_and_a_failed_process(tmp_path, tiny_model_dir):
    with serving(tmp_path, tiny_model_dir) as server, server.client() as client:
        server.wait_ready()
        stream = iter(client.chat.completions.create(**ASK, stream=True, extra_body=ENDLESS))
        next(stream)
        os.kill(server.child(), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="killed by signal 9"):
            list(stream)
        assert server.ended() == 1
        assert "killed by signal 9" in server.termination_log.read_text()


def test_the_engine_never_outlives_the_server(tmp_path, tiny_model_dir):
    with serving(tmp_path, tiny_model_dir) as server:
        child = server.child()
        poll(lambda: b"outrider" in Path(f"/proc/{child}/cmdline").read_bytes(), 10, "the engine's program")
        server.process.kill()
        server.ended()
        poll(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child), 30, "the engine's end")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("moment", ["before the ports answer", "while the engine loads"])
def test_sigterm_while_loading_ends_it_well(tmp_path, tiny_model_dir, moment):
    with serving(tmp_path, tiny_model_dir) as server:
        server.child()
        if moment == "while the engine loads":
            poll(lambda: _answers(server), 60, "the admin port")
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_an_import_that_drops_exceptions_ends_it_well(tmp_path, tiny_model_dir, signum):
    interrupt_import(tmp_path, "aiohttp", signum)
    path = os.pathsep.join(map(str, (tmp_path, REPOSITORY / "runtime")))
    with serving(tmp_path, tiny_model_dir, PYTHONPATH=path) as server:
        assert server.ended() == 0
    assert server.log.read_text() == ""


def _answers(server) -> bool:
    try:
        return server.request("/healthz")[0] == 200
    except OSError:
        return False


def _refused(server, exit_code: int) -> str:
    assert server.ended(90) == exit_code
    text = server.termination_log.read_text()
    assert text.count("\n") == 1
    assert text in server.log.read_text()
    return text


def test_a_port_in_use_is_refused_before_anything_loads(tmp_path, tiny_model_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with serving(tmp_path, tiny_model_dir, "--port", port) as server:
            text = _refused(server, 69)
    assert text.startswith(f"PortInUse: port {port} of 127.0.0.1 is in use")
    assert "loading" not in server.log.read_text()


def test_a_missing_model_is_refused_with_its_reason(tmp_path):
    with serving(tmp_path, tmp_path / "nothing") as server:
        assert _refused(server, 66).startswith("ModelNotFound: ")


def test_a_flag_out_of_range_is_refused_with_the_flag(tmp_path, tiny_model_dir):
    with serving(tmp_path, tiny_model_dir, "--block-size", "0") as server:
        assert server.ended() == 64
        assert "InvalidArgument: --block-size" in server.log.read_text()


def test_a_refused_draft_leaves_plain_serving_under_auto(tmp_path, tiny_model_dir, foreign_draft_dir):
    with (
        serving(tmp_path, tiny_model_dir, "--draft-model", str(foreign_draft_dir)) as server,
        server.client() as client,
    ):
        shown = server.wait_ready().speculation()
        assert (shown["draft"]["ok"], shown["draft"]["reason"]) == (False, "TokenizerMismatch")
        assert (shown["effective"]["state"], shown["effective"]["reason"]) == ("Unavailable", "DraftUnavailable")
        assert client.chat.completions.create(**ASK, max_tokens=4).usage.completion_tokens > 0
        assert server.speculation()["counters"]["drafts"] == 0


def test_a_refused_draft_is_fatal_under_enabled(tmp_path, tiny_model_dir, foreign_draft_dir):
    policy = json.dumps({**POLICY, "mode": "Enabled", "state": "Active", "reason": ""})
    draft = ("--draft-model", str(foreign_draft_dir))
    with serving(tmp_path, tiny_model_dir, *draft, OUTRIDER_POLICY=policy) as server:
        assert _refused(server, 78).startswith("DraftUnavailable: mode Enabled needs the draft, which was refused: Tok")
