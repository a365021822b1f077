"""The documented way without a server, as it is documented."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import outrider_runtime
from outrider_runtime import Completion, Engine, SamplingParams
from outrider_runtime.errors import BadRequest, Refusal

DOCS = Path(__file__).parents[2] / "docs/offline.md"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def engine(tiny_model_dir) -> Engine:
    return Engine.load(str(tiny_model_dir), kv_blocks=64, max_model_len=128, max_concurrency=4)


def test_the_documents_example_runs(tiny_model_dir, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    changed = code.replace("hf://Qwen/Qwen2.5-7B-Instruct", str(tiny_model_dir)).replace('"cuda"', '"cpu"')
    exec(changed.replace("8192", "256"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_texts_come_in_order_and_are_the_same_alone_and_together(engine):
    prompts = ["the road", [70, 71, 72], "two good fords and a broken bridge"]
    together = engine.generate(prompts, GREEDY)
    assert together == [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert all(completion.finish_reason in ("length", "stop") for completion in together)
    assert engine.stats().kv_cache_usage == 0


def test_each_prompt_may_have_parameters_of_its_own(engine):
    params = [replace(GREEDY, max_tokens=3), replace(GREEDY, max_tokens=5, logprobs=2, ignore_eos=True)]
    short, long = engine.generate(["the road", "the road"], params)
    assert long.token_ids[:3] == short.token_ids
    assert short.logprobs is None
    assert [len(each.top) for each in long.logprobs] == [2] * 5
    assert [each.top[0][0] for each in long.logprobs] == long.token_ids  # greedy


def test_a_stop_string_ends_a_text_before_it_and_frees_its_blocks(engine):
    params = replace(GREEDY, max_tokens=60, ignore_eos=True)
    whole = engine.generate(["the road"], params)[0]
    word = whole.text[6:9]
    stopped = engine.generate(["the road"], replace(params, stop=(word,)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(word)]
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    assert not engine.has_work
    assert engine.stats().kv_cache_usage == 0


def test_the_token_that_ended_a_text_is_not_shown(engine):
    params = replace(GREEDY, max_tokens=60, ignore_eos=True)
    whole = engine.generate(["the road"], params)[0]
    last = next(token for token in whole.token_ids if whole.token_ids.index(token) > 2)
    stopped = engine.generate(["the road"], replace(params, stop_token_ids=(last,)))[0]
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(last) + 1]
    before = engine.generate(["the road"], replace(params, max_tokens=len(stopped.token_ids) - 1))[0]
    assert stopped.text == before.text


def test_a_draft_changes_no_text(engine, tiny_model_dir, tiny_draft_dir):
    drafting = Engine.load(str(tiny_model_dir), draft_model=str(tiny_draft_dir), kv_blocks=64, max_model_len=128)
    prompts = ["the outrider", "a broken bridge"]
    params = SamplingParams(max_tokens=20, seed=5)
    assert drafting.generate(prompts, params) == engine.generate(prompts, params)
    assert drafting.stats().draft_tokens > 0


def test_one_bad_prompt_and_nothing_runs(engine):
    for prompts, params, field in [
        (["the road", ""], GREEDY, "prompt"),
        (["the road", [5] * 128], GREEDY, "prompt"),
        (["the road"], replace(GREEDY, min_p=2.0), "min_p"),
        (["the road"], [GREEDY, GREEDY], "params"),
        ("the road", GREEDY, "prompts"),
        ([70, 71, 72], GREEDY, "prompts"),
        (["the road"], replace(GREEDY, stop="###"), "stop"),
        (["the road"], replace(GREEDY, stop=("",)), "stop"),
    ]:
        with pytest.raises(BadRequest) as refused:
            engine.generate(prompts, params)
        assert refused.value.param == field
        assert not engine.has_work
    assert engine.generate([], GREEDY) == []


def test_a_model_may_be_given_as_a_path(tiny_model_dir):
    assert Engine.load(tiny_model_dir, kv_blocks=8).max_model_len == 128


def test_what_the_command_would_refuse_is_refused(tiny_model_dir, foreign_draft_dir):
    for options, reason in [
        ({"max_model_len": 0}, "InvalidArgument"),
        ({"no_such_option": 1}, "InvalidArgument"),
        ({"draft_model": str(foreign_draft_dir)}, "TokenizerMismatch"),
        ({"tensor_parallel_size": 2}, "UnsupportedParallelism"),
    ]:
        with pytest.raises(Refusal) as refusal:
            Engine.load(str(tiny_model_dir), **options)
        assert refusal.value.reason == reason, options


def test_the_package_offers_what_it_says_and_nothing_else():
    assert set(outrider_runtime.__all__) == {"Completion", "Engine", "SamplingParams"}
    assert Completion().token_ids == []
    with pytest.raises(AttributeError, match="no attribute Enigne"):
        outrider_runtime.Enigne  # noqa: B018
