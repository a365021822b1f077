"""Several answers to one request, and log-probabilities, whole and streamed, as OpenAI's own client reads them."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict

import openai
import pytest
from tests.runtime.server.conftest import MODEL
from tests.runtime.server.fake_engine import EOS, FakeEngine

from outrider_runtime.config import SchedulerConfig
from outrider_runtime.engine.messages import TokenLogprobs

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": MODEL, "prompt": "hello"}
WORDS = ("the road", "two good fords", "a broken bridge")
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def speaks(served) -> None:
    """Choice i says WORDS[i], a token at a time; so the first one ends first."""

    def script(message):
        index = int(message.request_id.rpartition("-")[2]) if "-" in message.request_id else 0
        ids = [*served.ids_of(WORDS[index]), EOS]
        return [ids[:2], *([id] for id in ids[2:])]

    served.engine.script = script


def told(token: int) -> TokenLogprobs:
    return TokenLogprobs(-token / 8, ((token, -token / 8), (token + 1, -token / 4)))


@pytest.fixture
async def client(served):
    url = str(served.api.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


class TestChoices:
    async def test_a_chat_of_three_has_three_answers_and_one_usage(self, served, client):
        speaks(served)
        answer = await client.chat.completions.create(**CHAT, n=3)
        assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
            (index, words, "stop") for index, words in enumerate(WORDS)
        ]
        assert answer.usage.prompt_tokens == len(served.engine.added[0].prompt)
        assert answer.usage.completion_tokens == sum(len(served.ids_of(words)) + 1 for words in WORDS)
        assert answer.usage.completion_tokens_details.target_forwards == sum(len(served.ids_of(w)) for w in WORDS)

    @pytest.mark.parametrize("kind", ["chat", "completion"])
    async def test_a_stream_of_three_tells_them_apart_by_index(self, served, client, kind):
        speaks(served)
        if kind == "chat":
            stream = await client.chat.completions.create(**CHAT, **USAGE, n=3)
        else:
            stream = await client.completions.create(**COMPLETION, **USAGE, n=3)
        chunks = [chunk async for chunk in stream]
        texts, ends = defaultdict(str), {}
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            assert choice.index not in ends
            texts[choice.index] += (choice.delta.content or "") if kind == "chat" else choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
        assert texts == dict(enumerate(WORDS))
        assert ends == dict.fromkeys(range(3), "stop")
        assert len({chunk.id for chunk in chunks}) == 1
        if kind == "chat":
            roles = [c.index for chunk in chunks for c in chunk.choices if c.delta.role == "assistant"]
            assert sorted(roles) == [0, 1, 2]
        assert chunks[-1].usage.completion_tokens == sum(len(served.ids_of(words)) + 1 for words in WORDS)

    async def test_each_choice_has_a_seed_of_its_own_that_the_requests_seed_determines(self, served, client):
        for seed in (7, 7, 8, None):
            await client.completions.create(**COMPLETION, n=3, **({} if seed is None else {"seed": seed}))
        seeds = [message.params.seed for message in served.engine.added]
        first, again, other, unseeded = (seeds[i : i + 3] for i in range(0, 12, 3))
        assert first[0] == 7
        assert first == again
        assert len({*first, *other}) == 6
        assert all(-(2**63) <= seed < 2**63 for seed in first)
        assert unseeded == [None] * 3

    async def test_one_choice_that_fails_fails_the_request_and_frees_the_others(self, serve):
        class Refusing(FakeEngine):
            def add(self, message):
                from outrider_runtime.errors import BadRequest

                if message.request_id.endswith("-1"):
                    raise BadRequest("no room")
                super().add(message)

        served = await serve(Refusing(script=lambda message: [[70]] * 100_000, step_seconds=0.002))
        got = await served.api.post("/v1/completions", json={**COMPLETION, "n": 3})
        assert got.status == 500
        assert "no room" in (await got.json())["error"]["message"]
        assert served.service.engine.in_flight == 0

    async def test_a_choice_that_a_stop_string_ends_frees_the_engine_while_others_go_on(self, served, client):
        served.engine.script = lambda message: [served.ids_of("ab"[message.request_id.endswith("-1")])] * 100_000
        served.engine.step_seconds = 0.002
        request = asyncio.create_task(client.completions.create(**COMPLETION, n=2, stop="aa"))
        async with asyncio.timeout(10):
            while not served.engine.aborted:
                await asyncio.sleep(0.005)
        assert served.engine.aborted == [served.engine.added[0].request_id]
        assert served.service.engine.in_flight == 1
        request.cancel()

    async def test_choices_take_places_in_the_queue(self, serve):
        served = await serve(scheduler=SchedulerConfig(max_concurrency=2, max_waiting=2))
        got = await served.api.post("/v1/completions", json={**COMPLETION, "n": 5})
        assert got.status == 400
        assert (await got.json())["error"]["param"] == "n"
        assert (await served.api.post("/v1/completions", json={**COMPLETION, "n": 4})).status == 200


class TestLogprobs:
    async def test_a_chat_has_an_object_for_each_token(self, served, client):
        served.engine.logprobs = told
        speaks(served)
        answer = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
        ids = [*served.ids_of(WORDS[0]), EOS]
        content = answer.choices[0].logprobs.content
        assert [token.logprob for token in content] == [-id / 8 for id in ids]
        assert b"".join(bytes(token.bytes) for token in content).decode() == WORDS[0]
        assert content[-1].token == "<|im_end|>"
        assert [len(token.top_logprobs) for token in content] == [2] * len(ids)
        assert [token.top_logprobs[0].token for token in content] == [token.token for token in content]
        assert content[0].top_logprobs[1].logprob == -ids[0] / 4
        assert served.engine.added[0].params.logprobs == 2

    async def test_a_completion_has_columns(self, served, client):
        served.engine.logprobs = told
        speaks(served)
        answer = await client.completions.create(**COMPLETION, logprobs=2)
        ids = [*served.ids_of(WORDS[0]), EOS]
        columns = answer.choices[0].logprobs
        assert "".join(columns.tokens[:-1]) == WORDS[0]
        assert columns.token_logprobs == [-id / 8 for id in ids]
        assert [WORDS[0][offset:] for offset in columns.text_offset] == [
            WORDS[0][len("".join(columns.tokens[:count])) :] for count in range(len(ids))
        ]
        assert [max(top.values()) for top in columns.top_logprobs] == columns.token_logprobs

    @pytest.mark.parametrize("count", [0, 1])
    async def test_a_completions_token_is_told_among_the_likeliest_even_if_it_is_not_one(self, served, client, count):
        served.engine.logprobs = lambda token: TokenLogprobs(-3.5, ((300, -0.25),)[:count])
        speaks(served)
        answer = await client.completions.create(**COMPLETION, logprobs=count)
        columns = answer.choices[0].logprobs
        assert [top[token] for token, top in zip(columns.tokens, columns.top_logprobs, strict=True)] == [
            -3.5 for _ in columns.tokens
        ]
        assert {len(top) for top in columns.top_logprobs} == {count + 1}

    @pytest.mark.parametrize("kind", ["chat", "completion"])
    async def test_a_stream_says_the_same_in_pieces(self, served, client, kind):
        served.engine.logprobs = told
        speaks(served)
        if kind == "chat":
            create, ask = client.chat.completions.create, {**CHAT, "logprobs": True, "top_logprobs": 2}
        else:
            create, ask = client.completions.create, {**COMPLETION, "logprobs": 2}
        whole = (await create(**ask)).choices[0].logprobs

        def told_step_by_step(token: int) -> TokenLogprobs:
            served.engine.go.clear()  # until its piece has come: what comes together may be one
            return told(token)

        served.engine.logprobs = told_step_by_step
        pieces = []
        async for chunk in await create(**ask, stream=True):
            pieces += [choice.logprobs for choice in chunk.choices if choice.logprobs]
            if pieces:
                served.engine.go.set()
        assert len(pieces) > 1
        if kind == "chat":
            assert [token for piece in pieces for token in piece.content] == whole.content
        else:
            for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [entry for piece in pieces for entry in getattr(piece, column)] == getattr(whole, column)

    async def test_a_token_that_is_no_character_is_spelt_in_hexadecimal(self, served, client):
        served.engine.logprobs = told
        ids = served.ids_of("€")
        served.engine.script = lambda message: [[id] for id in ids]
        answer = await client.completions.create(**COMPLETION, logprobs=0)
        assert answer.choices[0].text == "€"
        assert answer.choices[0].logprobs.tokens == [f"bytes:\\x{byte:02x}" for byte in "€".encode()]

    async def test_a_stop_string_cuts_them_with_the_tokens(self, served, client):
        served.engine.logprobs = told
        served.engine.script = lambda message: [served.ids_of("aaxE"), served.ids_of("NDyy")]
        answer = await client.completions.create(**COMPLETION, stop="END", logprobs=1)
        assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens

    async def test_not_asked_for_they_are_null(self, served, client):
        answer = await client.completions.create(**COMPLETION)
        assert answer.choices[0].logprobs is None

    async def test_a_probability_of_zero_is_told_as_a_number(self, served, client):
        served.engine.logprobs = lambda token: TokenLogprobs(-math.inf, ((token, -math.inf),))
        speaks(served)
        answer = await client.chat.completions.create(**CHAT, logprobs=True)
        assert all(token.logprob == -9999.0 for token in answer.choices[0].logprobs.content)
