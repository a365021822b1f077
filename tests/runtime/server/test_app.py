"""The API as clients use it, over a fake engine: answers, streams, bad input, limits, the end of things."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from dataclasses import replace

import openai
import pytest
from tests.runtime.server.conftest import MODEL
from tests.runtime.server.fake_engine import EOS, READY, FakeEngine

from outrider_runtime.config import SchedulerConfig
from outrider_runtime.errors import BadRequest
from outrider_runtime.server import app
from outrider_runtime.server.chat import ChatTemplate
from outrider_runtime.server.openai import CompletionRequest

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": MODEL, "prompt": "hello"}


def says(served, *steps: str, end: bool = True):
    """Script the engine: the text of each step, then the end token."""
    tokens = [served.ids_of(step) for step in steps]
    if end:
        tokens[-1].append(EOS)
    served.engine.script = lambda message: tokens


def endless(served):
    served.engine.script = lambda message: [[70]] * 100_000
    served.engine.step_seconds = 0.002


async def until(condition, timeout: float = 10.0):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)


async def events(response) -> list:
    text = (await response.read()).decode()
    return [json.loads(e.removeprefix("data: ")) if e != "data: [DONE]" else e for e in text.split("\n\n") if e]


@pytest.fixture
async def client(served):
    url = str(served.api.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


class TestAnswers:
    async def test_a_chat_answer_carries_text_and_usage(self, served, client):
        says(served, "the road", " ahead")
        answer = await client.chat.completions.create(**CHAT)
        assert answer.choices[0].message.content == "the road ahead"
        assert answer.choices[0].finish_reason == "stop"
        steps = served.engine.script(None)
        usage = answer.usage
        assert usage.prompt_tokens == len(served.engine.added[0].prompt)
        assert usage.completion_tokens == sum(map(len, steps))
        details = usage.completion_tokens_details
        assert details.accepted_prediction_tokens == sum(len(step) - 1 for step in steps)
        assert details.rejected_prediction_tokens == 4 * len(steps) - details.accepted_prediction_tokens
        assert details.target_forwards == len(steps)
        assert usage.prompt_tokens_details.cached_tokens == 0

    async def test_a_chat_stream_says_the_same_in_pieces(self, served, client):
        says(served, "the road", " ahead")
        options = {"include_usage": True}
        chunks = [c async for c in await client.chat.completions.create(**CHAT, stream=True, stream_options=options)]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "the road ahead"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert len({c.id for c in chunks}) == 1

    async def test_null_is_the_default_in_stream_options_too(self, served):
        says(served, "x")
        options = {"include_usage": None, "include_obfuscation": None}
        body = {**CHAT, "stream": True, "stream_options": options}
        got = await served.api.post("/v1/chat/completions", json=body)
        assert got.status == 200
        assert all("usage" not in event for event in await events(got))

    async def test_a_completion_and_its_stream_say_the_same(self, served, client):
        says(served, "one", " two", end=False)
        answer = await client.completions.create(**COMPLETION)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two", "length")
        chunks = [chunk async for chunk in await client.completions.create(**COMPLETION, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "one two"
        assert all(chunk.usage is None for chunk in chunks)

    async def test_a_stream_ends_with_done(self, served):
        says(served, "x")
        got = await served.api.post("/v1/completions", json={**COMPLETION, "stream": True})
        assert got.headers["Content-Type"].startswith("text/event-stream")
        assert (await events(got))[-1] == "data: [DONE]"

    async def test_characters_of_several_tokens_come_whole(self, served, client):
        ids = served.ids_of("a😀é")
        served.engine.script = lambda message: [[id] for id in ids]
        chunks = [chunk async for chunk in await client.completions.create(**COMPLETION, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "a😀é"

    async def test_a_stop_string_across_steps_cuts_text_and_usage_and_ends_the_work(self, served, client):
        says(served, "aaxE", "NDyy", "zz", "zz", end=False)
        answer = await client.completions.create(**COMPLETION, stop="END")
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("aax", "stop")
        kept = len(served.ids_of("aaxE")) + len(served.ids_of("ND"))
        assert answer.usage.completion_tokens == kept

    async def test_a_stop_string_frees_the_engine_at_once(self, served, client):
        served.engine.script = lambda message: [served.ids_of("stop")] * 10_000
        await client.completions.create(**COMPLETION, stop=["top"])
        await until(lambda: served.engine.aborted == [served.engine.added[0].request_id])

    async def test_a_stop_token_is_counted_and_not_shown(self, served, client):
        (end,) = served.ids_of("#")
        served.engine.script = lambda message: [served.ids_of("ab"), [*served.ids_of("c"), end]]
        ask = {**COMPLETION, "extra_body": {"stop_token_ids": [end]}}
        answer = await client.completions.create(**ask)
        assert (answer.choices[0].text, answer.usage.completion_tokens) == ("abc", len(served.ids_of("ab")) + 2)
        chunks = [chunk async for chunk in await client.completions.create(**ask, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"

    async def test_a_backlog_comes_as_one_piece(self, served):
        says(served, "a", "b", "c")
        stream = served.service.engine.submit("a", (1,), None, lambda: None)
        await until(lambda: len(stream.backlog) == 3)
        assert len(stream.take()) == 3

    async def test_what_was_asked_reaches_the_engine(self, served, client):
        await client.chat.completions.create(
            **CHAT,
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.9,
            seed=-3,
            stop=["x", "y"],
            presence_penalty=1,
            frequency_penalty=-1,
            user="someone",
            n=1,
            logprobs=False,
            extra_body={
                "top_k": 5,
                "repetition_penalty": 1.1,
                "min_tokens": 2,
                "ignore_eos": True,
                "speculative": False,
                "stop_token_ids": [7, 8],
                "tools": [],
            },
        )
        params = served.engine.added[0].params
        assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (7, 0.5, 0.9, -3)
        assert (params.stop, params.presence_penalty, params.frequency_penalty) == (("x", "y"), 1, -1)
        assert (params.top_k, params.repetition_penalty, params.min_tokens) == (5, 1.1, 2)
        assert (params.ignore_eos, params.speculative, params.stop_token_ids) == (True, 0, (7, 8))

    async def test_what_shapes_the_logits_reaches_the_engine_too(self, served, client):
        await client.completions.create(
            **COMPLETION,
            logit_bias={"5": -100, "70": 1.5},
            logprobs=3,
            extra_body={"min_p": 0.1, "bad_words": ["road", " ahead"]},
        )
        params = served.engine.added[0].params
        assert (params.min_p, params.logprobs) == (0.1, 3)
        assert params.logit_bias == ((5, -100.0), (70, 1.5))
        bare, spaced, *rest = params.bad_words
        assert [served.text_of(ids) for ids in (bare, spaced)] == ["road", " road"]
        assert "ahead" in [served.text_of(ids) for ids in rest]

    async def test_left_out_a_chat_may_fill_the_context_and_a_completion_gets_sixteen_tokens(self, served, client):
        await client.chat.completions.create(**CHAT)
        await client.completions.create(**COMPLETION)
        chat, completion = served.engine.added
        assert chat.params.max_tokens == READY.max_model_len - len(chat.prompt)
        assert completion.params.max_tokens == 16
        assert chat.params.temperature == 1.0

    @pytest.mark.parametrize("prompt", ["hello", ["hello"], [5, 6, 7], [[5, 6, 7]]])
    async def test_a_prompt_is_text_or_token_ids_alone_or_in_a_list(self, served, client, prompt):
        await client.completions.create(model=MODEL, prompt=prompt)
        expected = tuple(served.ids_of("hello")) if "hello" in prompt else (5, 6, 7)
        assert served.engine.added[0].prompt == expected

    async def test_the_model_is_listed(self, served, client):
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        assert (await served.api.get("/health")).status == 200


BAD = [
    # endpoint fields changed, status, param, code, words of the message
    ({"tools": [{"type": "function"}]}, 400, "tools", "unsupported_parameter", "tools is not supported"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter", "json_object"),
    ({"n": 0}, 400, "n", "invalid_value", "got 0"),
    ({"n": 129}, 400, "n", "invalid_value", "equal to 128; got 129"),
    ({"n": 2.0}, 400, "n", "invalid_value", "got 2.0"),
    ({"best_of": 3}, 400, "best_of", "unsupported_parameter", "3"),
    ({"logit_bias": [5]}, 400, "logit_bias", "invalid_value", "from token ids to numbers; got [5]"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", "invalid_value", "'x', which is no token id"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias", "invalid_value", "'-1', which is no token id"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias", "invalid_value", "of token 5 must be a number from -100 to 100"),
    ({"logit_bias": {"5": "1"}}, 400, "logit_bias", "invalid_value", "of token 5 must be a number"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", "invalid_value", "at most 1024"),
    ({"logit_bias": {"288": 1}}, 400, "logit_bias", "invalid_value", "token id 288; this model's go to 287"),
    ({"bad_words": "x"}, 400, "bad_words", "invalid_value", "list of strings"),
    ({"bad_words": ["x", " "]}, 400, "bad_words", "invalid_value", "none blank"),
    ({"bad_words": ["x" * 257]}, 400, "bad_words", "invalid_value", "at most 256 characters"),
    ({"bad_words": ["xqxq" * 5]}, 400, "bad_words", "invalid_value", "of 20 tokens; at most 16"),
    ({"bad_words": [chr(0x4E00 + i) for i in range(129)]}, 400, "bad_words", "invalid_value", "at most 128"),
    ({"stop_token_ids": 5}, 400, "stop_token_ids", "invalid_value", "list of token ids; got 5"),
    ({"stop_token_ids": [-5]}, 400, "stop_token_ids", "invalid_value", "list of token ids"),
    ({"stop_token_ids": [288]}, 400, "stop_token_ids", "invalid_value", "go to 287"),
    ({"stop_token_ids": list(range(65))}, 400, "stop_token_ids", "invalid_value", "at most 64"),
    ({"echo": True}, 400, "echo", "unsupported_parameter", "echo"),
    ({"suffix": "x"}, 400, "suffix", "unsupported_parameter", '"x"'),
    ({"min_p": 1.1}, 400, "min_p", "invalid_value", "equal to 1; got 1.1"),
    ({"min_p": -0.1}, 400, "min_p", "invalid_value", "got -0.1"),
    ({"temprature": 1}, 400, "temprature", "unknown_parameter", "temprature"),
    ({"model": "other"}, 404, "model", "model_not_found", "'other'"),
    ({"model": None}, 400, "model", "missing_required_parameter", "model is missing"),
    ({"model": 7}, 400, "model", "invalid_value", "got 7"),
    ({"temperature": 2.5}, 400, "temperature", "invalid_value", "less than or equal to 2; got 2.5"),
    ({"temperature": "1"}, 400, "temperature", "invalid_value", 'got "1"'),
    ({"temperature": True}, 400, "temperature", "invalid_value", "got true"),
    ({"top_p": 0}, 400, "top_p", "invalid_value", "greater than 0; got 0"),
    ({"top_k": -2}, 400, "top_k", "invalid_value", "got -2"),
    ({"seed": 2**63}, 400, "seed", "invalid_value", "9223372036854775808"),
    ({"stop": ""}, 400, "stop", "invalid_value", "none empty"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop", "invalid_value", "at most 4"),
    ({"presence_penalty": 3}, 400, "presence_penalty", "invalid_value", "got 3"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty", "invalid_value", "got -3"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", "invalid_value", "got 0"),
    ({"max_tokens": 0}, 400, "max_tokens", "invalid_value", "got 0"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "invalid_value", "got 1.5"),
    ({"max_tokens": 600}, 400, None, "context_length_exceeded", "holds 512 tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", None, "9"),
    ({"stream": "yes"}, 400, "stream", "invalid_value", '"yes"'),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value", "stream"),
    ({"speculative": 17}, 400, "speculative", "invalid_value", "0 to 16; got 17"),
    ({"speculative": True}, 400, "speculative", "invalid_value", "got true"),
]
BAD_CHAT = [
    ({"logprobs": 5}, "logprobs", "got 5"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "equal to 20; got 21"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"messages": None}, "messages", "missing"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hello"}, "messages", '"hello"'),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", '"tool"'),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "image_url"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls", "not supported"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages", "shorten the prompt"),
]
BAD_COMPLETION = [
    ({"logprobs": True}, "logprobs", "from 0 to 20; got true"),
    ({"logprobs": 21}, "logprobs", "from 0 to 20; got 21"),
    ({"top_logprobs": 2}, "top_logprobs", "not a field"),
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "at least one"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": ["a", "b"]}, "prompt", "one request for each"),
    ({"prompt": [1, "a"]}, "prompt", "token ids"),
    ({"prompt": [-1]}, "prompt", "token ids"),
    ({"prompt": [5, 288]}, "prompt", "go to 287"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages", "not a field"),
]


class TestBadInput:
    async def refused(self, served, path, body, status=400):
        got = await served.api.post(path, data=json.dumps(body) if isinstance(body, dict) else body)
        assert got.status == status
        error = (await got.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        assert served.engine.added == []
        return error

    @pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
    async def test_every_bad_field_is_named_with_its_value(self, served, path, body):
        for change, status, param, code, words in BAD:
            error = await self.refused(served, path, {**body, **change}, status)
            expected = param or ("messages" if "chat" in path else "prompt")
            assert (error["param"], error["code"]) == (expected, code), change
            assert words in error["message"], change

    async def test_every_bad_chat_is_named(self, served):
        for change, param, words in BAD_CHAT:
            error = await self.refused(served, "/v1/chat/completions", {**CHAT, **change})
            assert error["param"] == param, change
            assert words in error["message"], change

    async def test_every_bad_prompt_is_named(self, served):
        for change, param, words in BAD_COMPLETION:
            error = await self.refused(served, "/v1/completions", {**COMPLETION, **change})
            assert error["param"] == param, change
            assert words in error["message"], change

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b"\xff\xfe",
            b'{"model": NaN}',
            b'{"model": "\\ud800"}',
            b"[" * 100_000,
            b'{"seed": ' + b"9" * 10_000 + b"}",
        ],
    )
    async def test_a_body_that_is_no_json_object_is_refused(self, served, body):
        error = await self.refused(served, "/v1/chat/completions", body)
        assert error["code"] == "invalid_json"

    async def test_a_body_over_the_limit_is_refused_with_413(self, served):
        error = await self.refused(served, "/v1/completions", io.BytesIO(b" " * (app.MAX_BODY_BYTES + 1)), 413)
        assert str(app.MAX_BODY_BYTES) in error["message"]

    async def test_a_body_that_is_not_compressed_as_its_header_says_is_refused(self, served):
        got = await served.api.post("/v1/completions", data=b"{}", headers={"Content-Encoding": "gzip"})
        assert got.status == 400
        error = (await got.json())["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_body")
        assert "Content-Encoding" in error["message"]

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [("POST", "/v1/embeddings", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/other", 404)],
    )
    async def test_what_does_not_exist_is_an_openai_error_too(self, served, method, path, status):
        got = await served.api.request(method, path)
        assert got.status == status
        assert (await got.json())["error"]["type"] == "invalid_request_error"

    async def test_a_method_that_is_not_allowed_is_told_which_are(self, served):
        got = await served.api.get("/v1/chat/completions")
        assert (got.status, got.headers["Allow"]) == (405, "POST")

    async def test_while_loading_a_client_is_told_to_come_back(self, serve):
        served = await serve(loaded=False)
        got = await served.api.post("/v1/completions", json=COMPLETION)
        assert got.status == 503
        assert int(got.headers["Retry-After"]) >= 1
        assert (await got.json())["error"]["code"] == "model_loading"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/v1/chat/completions", CHAT, "messages"), ("/v1/completions", {**COMPLETION, "prompt": "hello"}, "prompt")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_with_a_token_that_the_model_has_no_row_for_is_refused(serve, path, body, param, stream):
    served = await serve(ready=replace(READY, vocab_size=5))
    got = await served.api.post(path, json={**body, "stream": stream})
    assert got.status == 400
    error = (await got.json())["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert "this model's go to 4" in error["message"]
    assert served.engine.added == []


class TestApiKey:
    @pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "secret", "Bearer secretx", "Basic secret"])
    async def test_without_the_key_nobody_gets_past_401(self, serve, header):
        served = await serve(api_key="secret")
        headers = {"Authorization": header} if header else {}
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/v1/nothing")):
            got = await served.api.request(method, path, headers=headers)
            assert got.status == 401
            assert (await got.json())["error"]["code"] == "invalid_api_key"
        assert (await served.api.get("/health")).status == 200

    async def test_with_the_key_all_is_as_without_one(self, serve):
        served = await serve(api_key="secret")
        got = await served.api.post("/v1/completions", json=COMPLETION, headers={"Authorization": "Bearer secret"})
        assert got.status == 200

    @pytest.mark.parametrize(("key", "header", "status"), [("secret\n", "secret", 200), ("\n", "", 401)])
    async def test_a_newline_behind_the_key_as_secrets_have_is_not_of_it(self, serve, key, header, status):
        served = await serve(api_key=key)
        got = await served.api.get("/v1/models", headers={"Authorization": f"Bearer {header}"})
        assert got.status == status


class TestLoad:
    async def test_beyond_the_queue_a_client_gets_429_with_retry_after_and_it_is_counted(self, serve):
        served = await serve(scheduler=SchedulerConfig(max_concurrency=1, max_waiting=2))
        served.engine.go.clear()
        taken = [asyncio.create_task(served.api.post("/v1/completions", json=COMPLETION)) for _ in range(3)]
        await until(lambda: len(served.engine.added) == 3)
        got = await served.api.post("/v1/completions", json=COMPLETION)
        assert got.status == 429
        assert int(got.headers["Retry-After"]) >= 1
        assert (await got.json())["error"]["code"] == "rate_limit_exceeded"
        counters = (await (await served.admin.get("/v1/speculation")).json())["counters"]
        assert counters["rejected_requests"] == 1
        served.engine.go.set()
        assert [(await task).status for task in taken] == [200] * 3
        assert (await served.api.post("/v1/completions", json=COMPLETION)).status == 200

    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_client_that_goes_away_frees_its_place(self, served, stream):
        endless(served)
        request = asyncio.create_task(served.api.post("/v1/completions", json={**COMPLETION, "stream": stream}))
        await until(lambda: served.engine.added)
        if stream:
            (await request).close()
        else:
            request.cancel()
        await until(lambda: served.engine.aborted == [served.engine.added[0].request_id])
        assert served.service.engine.in_flight == 0


class TestFaults:
    async def test_an_engine_that_dies_in_mid_stream_leaves_an_error_event(self, served):
        endless(served)
        got = await served.api.post("/v1/chat/completions", json={**CHAT, "stream": True})
        await got.content.readuntil(b"\n\n")
        served.thread.kill()
        last = (await events(got))[-1]
        assert last["error"]["type"] == "server_error"
        assert "engine" in last["error"]["message"]

    async def test_an_engine_that_dies_answers_those_who_wait_with_503_and_the_next_too(self, served):
        served.engine.go.clear()
        request = asyncio.create_task(served.api.post("/v1/completions", json=COMPLETION))
        await until(lambda: served.engine.added)
        served.thread.kill()
        assert (await request).status == 503
        got = await served.api.post("/v1/completions", json=COMPLETION)
        assert got.status == 503
        assert (await got.json())["error"]["code"] == "engine_dead"
        assert (await served.api.get("/health")).status == 503
        assert (await served.admin.get("/healthz")).status == 500

    async def test_the_openai_client_raises_on_an_error_event(self, served, client):
        endless(served)
        stream = await client.chat.completions.create(**CHAT, stream=True)
        await anext(stream)
        served.thread.kill()
        with pytest.raises(openai.APIError, match="engine"):
            async for _ in stream:
                pass

    async def test_a_prompt_the_engine_refuses_ends_that_request_alone(self, serve):
        class Refusing(FakeEngine):
            def add(self, message):
                from outrider_runtime.errors import BadRequest

                if len(message.prompt) == 3:
                    raise BadRequest("no room")
                super().add(message)

        served = await serve(Refusing())
        got = await served.api.post("/v1/completions", json={**COMPLETION, "prompt": [1, 2, 3]})
        assert got.status == 500
        assert "no room" in (await got.json())["error"]["message"]
        assert (await served.api.post("/v1/completions", json=COMPLETION)).status == 200


class TestConnections:
    async def test_a_young_connection_is_kept(self, served):
        got = await served.api.post("/v1/completions", json=COMPLETION)
        assert got.headers.get("Connection") != "close"

    @pytest.mark.parametrize("stream", [True, False])
    async def test_an_old_connection_is_closed_so_that_the_client_reaches_new_replicas(
        self, served, monkeypatch, stream
    ):
        monkeypatch.setattr(app, "MAX_CONNECTION_SECONDS", -1.0)
        got = await served.api.post("/v1/completions", json={**COMPLETION, "stream": stream})
        assert got.headers["Connection"] == "close"
        await got.read()

    async def test_a_stream_that_only_the_connections_end_ends_is_closed_though_the_client_would_keep_it(self, served):
        says(served, "x")
        body = json.dumps({**COMPLETION, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", served.api.port)
        writer.write(head.encode() + body)
        async with asyncio.timeout(10):
            answer = await reader.read()
        assert answer.endswith(b"data: [DONE]\n\n")
        assert b"keep-alive" not in answer
        writer.close()

    async def test_while_draining_new_requests_get_503_and_the_connection_closes(self, served):
        served.service.draining = True
        got = await served.api.post("/v1/completions", json=COMPLETION)
        assert got.status == 503
        assert got.headers["Connection"] == "close"
        assert (await got.json())["error"]["code"] == "server_shutdown"

    async def test_a_request_whose_prompt_is_still_read_is_waited_for(self, served, monkeypatch):
        reading, go_on = threading.Event(), threading.Event()

        def encode(*_):
            reading.set()
            go_on.wait(10)
            return (5,)

        monkeypatch.setattr(ChatTemplate, "encode", encode)
        request = asyncio.create_task(served.api.post("/v1/chat/completions", json=CHAT))
        await until(reading.is_set)
        served.service.draining = True
        assert not await served.service.idle(0.01)
        go_on.set()
        assert (await request).status == 200
        assert await served.service.idle(10)


async def test_a_model_without_chat_template_says_so(served):
    served.service.model = replace(served.service.model, chat_template=None)
    got = await served.api.post("/v1/chat/completions", json=CHAT)
    assert got.status == 400
    assert "/v1/completions" in (await got.json())["error"]["message"]


async def test_latencies_are_measured_once_for_each_request(served):
    says(served, "one", " two", " three")
    await served.api.post("/v1/completions", json=COMPLETION)
    lines = (await (await served.admin.get("/metrics")).text()).splitlines()
    tokens = sum(map(len, served.engine.script(None)))
    first = len(served.engine.script(None)[0])
    assert "outrider:time_to_first_token_seconds_count 1.0" in lines
    assert "outrider:e2e_request_latency_seconds_count 1.0" in lines
    between = [line for line in lines if line.startswith("outrider:inter_token_latency_seconds_count")]
    assert 0 <= float(between[0].split()[1]) <= tokens - first


def test_a_bad_word_of_no_tokens_is_the_request_s_fault():
    asked = CompletionRequest(model="m", prompt="x", bad_words=["\u200b"])
    with pytest.raises(BadRequest, match="no tokens of this model"):
        asked.sampling_params(1, max_model_len=32, vocab_size=8, encode=lambda text: ())


def test_a_bad_word_of_a_token_that_the_model_has_no_row_for_is_the_request_s_fault():
    """As Gemma 3's tokenizer knows one for images, which its models of text alone lack."""
    asked = CompletionRequest(model="m", prompt="x", bad_words=["<image_soft_token>"])
    with pytest.raises(BadRequest, match="bad_words has token id 8; this model's go to 7") as refused:
        asked.sampling_params(1, max_model_len=32, vocab_size=8, encode=lambda text: (8,))
    assert (refused.value.param, refused.value.code) == ("bad_words", "invalid_value")
