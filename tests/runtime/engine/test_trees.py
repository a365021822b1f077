"""Heads that draft trees, in the engine: no text shows it, and more of a tree stands than of a chain."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.runtime.engine.driver import EOS, MAX_MODEL_LEN, ON, SUSPENDED, Collector, assert_all_free, run
from tests.runtime.heads import eagle_head, knowing_eagle, knowing_medusa, medusa_heads, successor_target
from tests.runtime.tiny import VOCAB, ours, reference_model

from outrider_runtime.config import (
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    SourceConfig,
    SpeculationConfig,
    TreeConfig,
)
from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.sampling.params import SamplingParams

GREEDY = SamplingParams(max_tokens=14, temperature=0.0)
PARAMS = [
    replace(GREEDY, logprobs=2),
    SamplingParams(max_tokens=14, seed=1),
    SamplingParams(max_tokens=14, seed=4, frequency_penalty=1.0, repetition_penalty=1.1, top_k=20),
    SamplingParams(max_tokens=14, seed=3, top_p=0.8, ignore_eos=True, speculative=2),
]
_random = random.Random(0)
PROMPTS = [tuple(_random.randrange(4, VOCAB) for _ in range(length)) for length in (1, 7, 40)]
PROMPTS += [PROMPTS[-1][:24], (*PROMPTS[-1][:24], 20, 21)]
METHODS = ("eagle3", "eagle", "medusa")


def head_of(method, model):
    if method == "medusa":
        return medusa_heads(model.config)
    return eagle_head(3 if method == "eagle3" else 1, model.config)


def knowing(method, model):
    return knowing_medusa(model) if method == "medusa" else knowing_eagle(3 if method == "eagle3" else 1, model)


def make_engine(method, model, head, *, tree=TreeConfig(3, 12), k=4, blocks=96, budget=96, policy=ON, **more):  # noqa: B008  # frozen
    config = EngineConfig(
        model=SourceConfig("tiny"),
        speculation=SpeculationConfig(method=method, max_tokens=k, tree=tree),
        cache=CacheConfig(block_size=4, num_blocks=blocks),
        scheduler=SchedulerConfig(max_concurrency=8, max_batched_tokens=budget),
        policy=policy,
    )
    return Engine(config, model, head, eos_token_ids=(EOS,), max_model_len=MAX_MODEL_LEN, **more)


def everything() -> list[AddRequest]:
    return [
        AddRequest(f"{name}-{index}", prompt, params)
        for name, params in enumerate(PARAMS)
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def plain() -> Collector:
    model = ours(reference_model())
    return run(make_engine("medusa", model, head_of("medusa", model), policy=SUSPENDED), everything())


def told(collector: Collector, request_id: str) -> list:
    return [each for delta in collector.deltas[request_id] for each in delta.logprobs or ()]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_texts_and_logprobs_are_those_of_plain_decoding(method, overlap, plain):
    """In a crowd: prompts beside trees, prefix hits, preemptions, penalties, tops and limits."""
    model = ours(reference_model())
    engine = make_engine(method, model, head_of(method, model), blocks=72 if overlap else 40, overlap=overlap)
    drafted = run(engine, everything())
    for request in everything():
        assert drafted.text(request.request_id) == plain.text(request.request_id), request.request_id
        ours_, theirs = told(drafted, request.request_id), told(plain, request.request_id)
        assert [each.logprob for each in ours_] == pytest.approx([each.logprob for each in theirs], abs=1e-4)
    assert engine.stats().accepted_tokens > 0
    assert_all_free(engine)


@pytest.mark.parametrize("method", METHODS)
def test_a_head_that_knows_its_target_has_the_whole_depth_stand(method):
    model = successor_target()
    engine = make_engine(method, model, knowing(method, model))
    request = AddRequest("a", (5, 6, 7), replace(GREEDY, max_tokens=20, ignore_eos=True))
    collector = run(engine, [request])
    lengths = [len(delta.token_ids) for delta in collector.deltas["a"]]
    assert max(lengths) == 5
    assert min(lengths[1:-1]) >= 4  # some room of a tree that grows by confidence goes to other branches
    assert max(delta.drafted for delta in collector.deltas["a"]) == 12


@pytest.mark.parametrize("method", METHODS)
def test_a_tree_of_fewer_tokens_than_it_may_be_deep_is_as_deep_as_it_has_tokens(method):
    """With a single candidate behind each token, three tokens hold all that is read while four are drafted."""
    model = successor_target()
    engine = make_engine(method, model, knowing(method, model), tree=TreeConfig(1, 3))
    collector = run(engine, [AddRequest("a", (5, 6, 7), replace(GREEDY, max_tokens=20, ignore_eos=True))])
    assert max(len(delta.token_ids) for delta in collector.deltas["a"]) == 4
    assert len(collector.tokens("a")) == 20


def test_of_a_tree_more_stands_than_of_a_chain():
    """Of tokens drawn with noise that the head's own logits hardly know."""
    accepted = []
    for tree in (TreeConfig(4, 20), None):
        model = successor_target()
        head = knowing_medusa(model)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(0.35 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        engine = make_engine("medusa", model, head, tree=tree, budget=200)
        requests = [
            AddRequest(str(seed), (5, 6), SamplingParams(max_tokens=40, seed=seed, ignore_eos=True))
            for seed in range(6)
        ]
        run(engine, requests)
        accepted.append(engine.stats().accepted_tokens)
    assert accepted[0] > accepted[1]


def test_what_depends_on_the_text_drafts_a_chain():
    model = successor_target()
    engine = make_engine("eagle", model, knowing("eagle", model))
    params = replace(GREEDY, max_tokens=20, ignore_eos=True, presence_penalty=0.01)
    collector = run(engine, [AddRequest("a", (5, 6, 7), params)])
    assert {delta.drafted for delta in collector.deltas["a"]} <= {0, 1, 2, 3, 4}
    assert max(len(delta.token_ids) for delta in collector.deltas["a"]) == 5


def test_the_reflex_lets_trees_be_drafted_where_it_learns_that_they_pay():
    model = successor_target()
    engine = make_engine("medusa", model, knowing("medusa", model), policy=replace(ON, mode="Auto"))
    engine.capture(lambda line: None)
    requests = [
        AddRequest(str(index), (5 + index, 6), replace(GREEDY, max_tokens=60, ignore_eos=True)) for index in range(3)
    ]
    collector = run(engine, requests)
    for request in requests:
        assert len(collector.tokens(request.request_id)) == 60
    stats = engine.stats()
    assert stats.draft_tokens >= stats.accepted_tokens
