"""The demo's models through the engine: the text is transformers', and the draft helps as much as it can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.runtime.engine.driver import Collector, run

from outrider_runtime.config import CacheConfig, EngineConfig, SchedulerConfig, SourceConfig, SpeculationConfig
from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.models.config import model_config
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.sampling.params import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

TOKENS = 26
K = 4
QUESTIONS = (
    "Give me a JSON array of three cities with the fields id, name and country.",
    "What is the difference between TCP and UDP?",
)
COPY = (
    'Repeat this JSON exactly, twice:\n{"name": "outrider", "kind": "runtime", "replicas": 3, '
    '"labels": {"app": "demo", '
    '"tier": "backend", "owner": "platform team"}, "ports": [8000, 8001], "env": {"LOG_LEVEL": "info"}}'
)


def load(folder: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM(model_config(json.loads((folder / "config.json").read_text())), torch.float32, "cpu")
    model.load(load_file(folder / "model.safetensors").items())
    return model


def tokens_of(tokenizer: transformers.PreTrainedTokenizerBase, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.fixture(scope="module")
def texts(demo_models) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what transformers' own greedy decoding makes of them."""
    folder = demo_models / "smollm2-135m-instruct"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = []
    for question in QUESTIONS:
        prompt = tokens_of(tokenizer, question)
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        length = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
        whole = model.generate(ids, attention_mask=mask, do_sample=False, **length)[0].tolist()
        texts.append((prompt, whole[len(prompt) :]))
    return texts


@pytest.fixture(scope="module")
def draft(demo_models) -> LlamaForCausalLM:
    return load(demo_models / "smollm2-135m-instruct-int4")


@pytest.fixture(scope="module")
def target(demo_models) -> LlamaForCausalLM:
    return load(demo_models / "smollm2-135m-instruct")


def make(target: LlamaForCausalLM, draft: LlamaForCausalLM | None, method: str) -> Engine:
    config = EngineConfig(
        model=SourceConfig("demo"),
        speculation=SpeculationConfig(method=method, max_tokens=K),
        cache=CacheConfig(num_blocks=128),
        scheduler=SchedulerConfig(max_concurrency=4, max_batched_tokens=64),
    )
    return Engine(config, target, draft, eos_token_ids=target.config.eos_token_ids, max_model_len=512)


def requests(texts: list[tuple[list[int], list[int]]], **changes) -> list[AddRequest]:
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, min_tokens=TOKENS, **changes)
    return [AddRequest(str(index), tuple(prompt), params) for index, (prompt, _) in enumerate(texts)]


def accepted_at_best(agrees: list[bool]) -> tuple[int, int]:
    """Drafted and accepted tokens of a greedy loop, given where the draft's choice behind the target's text is the
    target's own."""
    drafted = accepted = 0
    at = 1  # the first token comes with the prompt
    while at < len(agrees):
        k = min(K, len(agrees) - at - 1)
        stands = next((i for i in range(k) if not agrees[at + i]), k)
        drafted, accepted, at = drafted + k, accepted + stands, at + stands + 1
    return drafted, accepted


@pytest.fixture(scope="module")
def speculated(texts, target, draft) -> tuple[Engine, Collector]:
    engine = make(target, draft, "draft-model")
    return engine, run(engine, requests(texts))


def test_speculative_greedy_text_is_plain_greedy_text_and_transformers_own(texts, target, speculated):
    plain = run(make(target, None, "ngram"), requests(texts, speculative=0))
    for index, (_, expected) in enumerate(texts):
        assert plain.tokens(str(index)) == speculated[1].tokens(str(index)) == tuple(expected)
    assert not any(delta.drafted for deltas in plain.deltas.values() for delta in deltas)


def test_the_draft_is_accepted_as_often_as_its_own_forward_says(demo_models, texts, speculated):
    """A draft whose KV went wrong anywhere would fall short of one forward over the finished text."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        demo_models / "smollm2-135m-instruct-int4", dtype=torch.float32
    )
    drafted = accepted = 0
    for prompt, text in texts:
        with torch.inference_mode():
            choices = reference(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        counts = accepted_at_best([choice == token for choice, token in zip(choices.tolist(), text, strict=True)])
        drafted, accepted = drafted + counts[0], accepted + counts[1]
    stats = speculated[0].stats()
    assert (stats.draft_tokens, stats.accepted_tokens) == (drafted, accepted)
    assert 0.45 < accepted / drafted < 0.75  # 0.59 over many prompts


def test_copied_text_is_found_by_ngram_in_a_third_of_the_steps(demo_models, target):
    folder = demo_models / "smollm2-135m-instruct"
    prompt = tokens_of(transformers.AutoTokenizer.from_pretrained(folder), COPY)
    steps, copies = [], []
    for speculative in (0, None):
        collector = run(make(target, None, "ngram"), requests([(prompt, [])], speculative=speculative))
        steps.append(len(collector.deltas["0"]))
        copies.append(collector.tokens("0"))
    assert copies[0] == copies[1]
    assert steps[1] * 3 <= steps[0]
