"""Runs requests through an engine, and the naive way: one whole forward per token, nothing kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import torch
from tests.runtime.methods import METHODS
from tests.runtime.tiny import tiny_pair

from outrider_runtime.config import CacheConfig, EngineConfig, SchedulerConfig, SourceConfig, SpeculationConfig
from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.messages import AddRequest, TokenDelta
from outrider_runtime.models.causal import CausalLM
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.pipeline import Row, sample
from outrider_runtime.speculation.policy import Policy

EOS = 3
MAX_MODEL_LEN = 96
ON = Policy(mode="Enabled", num_speculative_tokens=16)  # as long as it may be, whether or not it pays
SUSPENDED = Policy(num_speculative_tokens=16, state="Suspended")


def make_engine(
    method: str = "no speculation",
    *,
    k: int = 4,
    blocks: int = 64,
    block_size: int = 4,
    concurrency: int = 8,
    budget: int = 64,
    prefix_caching: bool = True,
    policy: Policy = ON,
    clock=None,
    overlap: bool | None = None,
    target: CausalLM | None = None,
    draft: CausalLM | None = None,
    kind: type[Engine] = Engine,
) -> Engine:
    """Around the tiny Llama on the CPU and the method's draft, unless others are given."""
    speculation = METHODS[method]
    target = target or tiny_pair()[1]
    config = EngineConfig(
        model=SourceConfig("tiny"),
        speculation=SpeculationConfig(method=speculation.method, max_tokens=k, **speculation.options),
        cache=CacheConfig(block_size=block_size, num_blocks=blocks, prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(max_concurrency=concurrency, max_batched_tokens=budget),
        policy=policy,
    )
    more = {} if clock is None else {"clock": clock}
    models = target, draft or speculation.draft(target)
    return kind(config, *models, eos_token_ids=(EOS,), max_model_len=MAX_MODEL_LEN, overlap=overlap, **more)


@cache
def naive(prompt: tuple[int, ...], params: SamplingParams) -> tuple[tuple[int, ...], str]:
    """The text that params.seed determines, by transformers' forward over the whole text for each token."""
    reference, _ = tiny_pair()
    tokens = list(prompt)
    while True:
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens])).logits[0, -1:]
        tokens.append(int(sample(logits, [Row(params, params.seed or 0, tokens, len(prompt))], (EOS,))))
        ends = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, EOS}
        if tokens[-1] in ends:
            return tuple(tokens[len(prompt) :]), "stop"
        if len(tokens) - len(prompt) == params.max_tokens or len(tokens) == MAX_MODEL_LEN:
            return tuple(tokens[len(prompt) :]), "length"


class Collector:
    """What each request has got so far, and how it ended."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[TokenDelta]] = defaultdict(list)

    def take(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            assert self.finish_reason(delta.request_id) is None, "a delta after the end"
            assert delta.token_ids
            self.deltas[delta.request_id].append(delta)

    def tokens(self, request_id: str) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas[request_id] for token in delta.token_ids)

    def finish_reason(self, request_id: str) -> str | None:
        return self.deltas[request_id][-1].finish_reason if self.deltas[request_id] else None

    def text(self, request_id: str) -> tuple[tuple[int, ...], str | None]:
        return self.tokens(request_id), self.finish_reason(request_id)


def run(engine: Engine, requests: Sequence[AddRequest], collector: Collector | None = None) -> Collector:
    """All of them at once, to their ends."""
    collector = collector or Collector()
    for request in requests:
        engine.add(request)
    for _ in range(2000):
        if not engine.has_work:
            return collector
        collector.take(engine.step().deltas)
    raise AssertionError("the engine does not come to an end")


def assert_all_free(engine: Engine) -> None:
    assert engine.stats().kv_cache_usage == 0
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
