"""The load generator counts what the server gave, whatever shares a chunk, and tells errors by their kind."""

from __future__ import annotations

import pytest
from benchmarks.serving import Client, closed_loop, from_file, open_loop, summary, synthetic
from tests.runtime.server.conftest import MODEL

from outrider_runtime.config import SchedulerConfig

STREAM = {"model": MODEL, "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}


def bodies(count: int) -> list[dict]:
    return [{**STREAM, **prompt} for prompt in synthetic(count, 5, 288, seed=0)]


@pytest.mark.parametrize("loop", ["closed", "open"])
async def test_tokens_are_counted_from_usage_though_several_share_a_chunk(served, loop):
    served.engine.script = lambda message: [[70, 71, 72]] * 4
    client = Client(str(served.api.make_url("")), None)
    if loop == "closed":
        answers = await closed_loop(client, bodies(10), 3)
    else:
        answers = await open_loop(client, bodies(10), 500.0, seed=0)
    told = summary(answers, 0.1)
    assert (told["completed"], told["errors"]) == (10, {})
    assert (told["output_tokens"], told["prompt_tokens"]) == (120, 50)
    assert told["acceptance"] == 0.5
    assert 0 < told["ttft_ms"]["p50"] <= told["e2e_ms"]["p99"]
    assert len({message.prompt for message in served.engine.added}) == 10


async def test_a_closed_loop_runs_no_more_than_it_says(serve):
    served = await serve(scheduler=SchedulerConfig(max_concurrency=2, max_waiting=1))
    client = Client(str(served.api.make_url("")), None)
    assert summary(await closed_loop(client, bodies(12), 3), 0.1)["errors"] == {}


async def test_errors_are_told_by_kind(serve):
    served = await serve(api_key="secret")
    told = summary(await closed_loop(Client(str(served.api.make_url("")), None), bodies(2), 1), 0.1)
    assert (told["completed"], told["errors"]) == (0, {"status 401": 2})
    served.engine.script = lambda message: [[70]] * 100_000
    client = Client(str(served.api.make_url("")), "secret")
    served.engine.fault = RuntimeError("broken")
    assert summary(await closed_loop(client, bodies(1), 1), 0.1)["errors"] == {"error event": 1}


def test_a_file_has_text_prompts_and_messages_and_is_gone_through_again(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('plain text\n{"prompt": "a", "id": 7}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    text, prompt, messages, again = from_file(file, 4)
    assert (text, prompt, again) == ({"prompt": "plain text"}, {"prompt": "a"}, text)
    assert messages == {"messages": [{"role": "user", "content": "b"}]}
