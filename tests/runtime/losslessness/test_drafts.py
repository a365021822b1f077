"""How many drafts are made and stand: what a request and a draft are due, on texts that are right in any case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.runtime.engine.driver import make_engine, naive, run
from tests.runtime.losslessness.asked import GREEDY, PROMPTS, WAYS

from outrider_runtime.engine.messages import AddRequest


@pytest.mark.parametrize("speculative", [None, 0, 1, 3])
def test_a_request_may_ask_for_less_speculation(speculative):
    params, prompt = replace(GREEDY, speculative=speculative), PROMPTS["of ten blocks"]
    engine = make_engine("equal draft", k=4)
    other = AddRequest("other", PROMPTS["of a block and more"], GREEDY)
    collector = run(engine, [AddRequest("it", prompt, params), other])
    assert max(delta.drafted for delta in collector.deltas["it"]) == (4 if speculative is None else speculative)
    assert max(delta.drafted for delta in collector.deltas["other"]) == 4
    assert collector.text("it") == naive(prompt, GREEDY)


@pytest.mark.parametrize("way", ["greedy", "sampled", "top-k", "sampled, penalties"])
def test_an_equal_draft_is_accepted_whole_a_random_one_hardly(way):
    """With the same noise, sampled as well as greedy."""
    params, rates = replace(WAYS[way], max_tokens=20, ignore_eos=True), {}
    for method in ("equal draft", "worse draft", "random draft"):
        engine = make_engine(method)
        run(engine, [AddRequest(name, prompt, params) for name, prompt in PROMPTS.items()])
        rates[method] = engine.stats().accepted_tokens / engine.stats().draft_tokens
    assert rates["equal draft"] == 1.0
    assert rates["random draft"] < 0.4 < rates["worse draft"] < 1.0, rates


def test_what_repeats_is_drafted_from_itself():
    engine = make_engine("n-gram", k=6)
    params = replace(GREEDY, max_tokens=40, repetition_penalty=0.2)  # below 1 rewards repetition
    request = AddRequest("it", PROMPTS["that repeats"], params)
    assert run(engine, [request]).text("it") == naive(request.prompt, params)
    assert engine.stats().accepted_tokens > 10
