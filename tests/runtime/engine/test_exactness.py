"""Speculation, batching, chunks, preemption, cached prefixes and changes of policy never change a text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.runtime.engine.driver import (
    METHODS,
    ON,
    SUSPENDED,
    Collector,
    assert_all_free,
    make_engine,
    naive,
    run,
)
from tests.runtime.tiny import VOCAB

from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.table import Mode, mode_of

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_tokens=20, seed=1),
    "cold": SamplingParams(max_tokens=20, temperature=0.3, seed=-5),
    "top-k": SamplingParams(max_tokens=20, top_k=5, seed=2),
    "top-p": SamplingParams(max_tokens=20, top_p=0.8, seed=3),
    "top-k and top-p": SamplingParams(max_tokens=20, temperature=1.3, top_k=20, top_p=0.9, seed=2**64 + 17),
    "greedy with penalties": replace(GREEDY, frequency_penalty=0.6, presence_penalty=0.4, repetition_penalty=1.3),
    "sampled with penalties": SamplingParams(max_tokens=20, seed=4, frequency_penalty=1.0, repetition_penalty=1.1),
    "stop tokens": SamplingParams(max_tokens=40, seed=6, stop_token_ids=(7, 8, 9, 10)),
    "min_tokens": SamplingParams(max_tokens=30, seed=7, min_tokens=12, stop_token_ids=(7, 8, 9, 10, 11, 12)),
    "EOS ignored": SamplingParams(max_tokens=90, seed=8, ignore_eos=True),
    "one token": SamplingParams(max_tokens=1, seed=9),
}
BY_MODE = {  # a step draws for all of its requests by the way that the most demanding one needs
    Mode.GREEDY: ["greedy"],
    Mode.NOISE: ["greedy", "sampled", "cold", "stop tokens", "EOS ignored", "one token"],
    Mode.FULL: [name for name, params in PARAMS.items() if mode_of(params) is Mode.FULL],
}
_random = random.Random(0)
PROMPTS = [tuple(_random.randrange(4, VOCAB) for _ in range(length)) for length in (1, 7, 40)]
PROMPTS += [PROMPTS[-1][:24], (*PROMPTS[-1][:24], 20, 21)]  # shared prefixes, of full blocks and not
PROMPTS.append((11, 12, 13, 14, 15) * 5)  # what n-gram likes


def everything(params: list[SamplingParams]) -> list[AddRequest]:
    return [
        AddRequest(f"{name}-{index}", prompt, each)
        for name, each in enumerate(params)
        for index, prompt in enumerate(PROMPTS)
    ]


def assert_exact(collector: Collector, requests: list[AddRequest]) -> None:
    for request in requests:
        assert collector.text(request.request_id) == naive(request.prompt, request.params), request


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", BY_MODE, ids=lambda mode: mode.name)
def test_a_text_is_what_the_naive_loop_writes(method, mode):
    requests = everything([PARAMS[name] for name in BY_MODE[mode]])
    engine = make_engine(method, concurrency=24, blocks=400, budget=128)
    assert_exact(run(engine, requests), requests)
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("method", "overlap"),
    [("no speculation", True), ("n-gram", True), ("worse draft", True), ("worse draft", False)],
    ids=lambda value: value if isinstance(value, str) else "one step behind" if value else "in turn",
)
@pytest.mark.parametrize(
    "setting",
    [
        {"k": 16},
        {"budget": 8},  # chunks of at most 8 tokens, decodes taken off
        {"blocks": 26, "k": 3},  # a full context and two blocks: preemption
        {"blocks": 26, "k": 3, "prefix_caching": False},
        {"block_size": 1, "blocks": 128},
        {"concurrency": 1},
        {"concurrency": 32, "budget": 512, "blocks": 512},
    ],
    ids=str,
)
def test_neither_shape_nor_neighbours_of_a_step_matter(method, setting, overlap):
    names = ("greedy", "sampled with penalties")
    requests = everything([PARAMS[name] for name in names])
    random.Random(1).shuffle(requests)
    engine = make_engine(method, overlap=overlap, **setting)
    assert_exact(run(engine, requests), requests)
    assert_all_free(engine)


def test_running_out_of_blocks_preempts_and_comes_back():
    engine = make_engine("equal draft", blocks=26, prefix_caching=False)
    requests = everything([PARAMS["EOS ignored"]])[:4]
    for request in requests:
        engine.add(request)
    collector, most, fell = Collector(), 0, False
    while engine.has_work:
        collector.take(engine.step().deltas)
        stats = engine.stats()
        fell |= stats.running < most and not any(collector.finish_reason(each.request_id) for each in requests)
        most = max(most, stats.running)
    assert fell
    assert_exact(collector, requests)
    assert_all_free(engine)


@pytest.mark.parametrize("method", METHODS)
def test_a_policy_that_comes_and_goes_does_not_show_in_the_text(method):
    requests = everything([PARAMS["greedy"], PARAMS["sampled"]])
    engine = make_engine(method, concurrency=20, blocks=200)
    collector = Collector()
    for request in requests:
        engine.add(request)
    switch = random.Random(2)
    while engine.has_work:
        engine.set_policy(switch.choice([ON, ON, SUSPENDED, replace(ON, num_speculative_tokens=1)]))
        collector.take(engine.step().deltas)
    assert_exact(collector, requests)


@pytest.mark.parametrize("speculative", [None, 0, 1, 3])
def test_a_request_may_ask_for_less_speculation(speculative):
    params = replace(GREEDY, speculative=speculative)
    engine = make_engine("equal draft", k=4)
    collector = run(engine, [AddRequest("it", PROMPTS[2], params), AddRequest("other", PROMPTS[1], GREEDY)])
    assert max(delta.drafted for delta in collector.deltas["it"]) == (4 if speculative is None else speculative)
    assert max(delta.drafted for delta in collector.deltas["other"]) == 4
    assert collector.text("it") == naive(PROMPTS[2], GREEDY)


def test_an_equal_draft_is_accepted_whole_a_random_one_hardly():
    """With the same noise, sampled as well as greedy."""
    for params in (PARAMS["greedy"], PARAMS["sampled"], PARAMS["top-k and top-p"], PARAMS["sampled with penalties"]):
        rates = {}
        for method in ("equal draft", "worse draft", "random draft"):
            engine = make_engine(method)
            run(engine, everything([replace(params, ignore_eos=True)]))
            stats = engine.stats()
            rates[method] = stats.accepted_tokens / stats.draft_tokens
        assert rates["equal draft"] == 1.0
        assert rates["random draft"] < 0.4 < rates["worse draft"] < 1.0, (params, rates)


def test_what_repeats_is_drafted_from_itself():
    engine = make_engine("n-gram", k=6)
    prompt = (11, 12, 13, 14, 15) * 8
    params = replace(GREEDY, max_tokens=40, repetition_penalty=0.2)  # below 1 rewards repetition
    request = AddRequest("it", prompt, params)
    assert_exact(run(engine, [request]), [request])
    assert engine.stats().accepted_tokens > 10


CHOICES = [PARAMS[name] for name in ("greedy", "sampled", "greedy with penalties", "stop tokens")]


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    method=st.sampled_from(sorted(METHODS)),
    blocks=st.integers(24, 60),
    budget=st.integers(4, 40),
    concurrency=st.integers(1, 4),
    k=st.integers(1, 6),
    prefix_caching=st.booleans(),
    overlap=st.booleans(),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(0, len(CHOICES) - 1)),
            st.tuples(st.just("step"), st.integers(1, 5), st.just(0)),
            st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
            st.tuples(st.just("policy"), st.integers(0, 3), st.just(0)),
        ),
        max_size=30,
    ),
)
def test_no_order_of_events_changes_a_text_or_loses_a_block(
    method, blocks, budget, concurrency, k, prefix_caching, overlap, actions
):
    engine = make_engine(
        method,
        blocks=blocks,
        budget=budget,
        concurrency=concurrency,
        k=k,
        prefix_caching=prefix_caching,
        overlap=overlap,
    )
    collector, added, aborted = Collector(), [], set()
    for action, one, other in actions:
        if action == "add":
            added.append(AddRequest(str(len(added)), PROMPTS[one], CHOICES[other]))
            engine.add(added[-1])
        elif action == "step":
            for _ in range(one):
                collector.take(engine.step().deltas)
        elif action == "abort" and added:
            request = added[one % len(added)]
            if collector.finish_reason(request.request_id) is None:
                aborted.add(request.request_id)
            engine.abort(request.request_id)
        elif action == "policy":
            engine.set_policy(replace(ON, num_speculative_tokens=one) if one else SUSPENDED)
    run(engine, [], collector)
    assert_exact(collector, [request for request in added if request.request_id not in aborted])
    for request_id in aborted:
        request = added[int(request_id)]
        text = collector.tokens(request_id)
        assert text == naive(request.prompt, request.params)[0][: len(text)]
    assert_all_free(engine)
