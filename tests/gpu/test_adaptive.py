"""On a CUDA device the reflex measures steps, chooses among captured graphs only, and drafts where that pays."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
import torch

from outrider_runtime.config import CacheConfig, EngineConfig, SchedulerConfig, SourceConfig, SpeculationConfig
from outrider_runtime.engine.calibration import Calibration
from outrider_runtime.engine.capture import Draft
from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.models.config import model_config
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.speculation.cost import StepShape
from outrider_runtime.speculation.policy import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device here; hack/gpu_check.sh runs these on one"
    ),
]

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
STREAMS = 32


def synthetic(layers: int, **shape: int) -> LlamaForCausalLM:
    config = model_config({**SHAPE, "num_hidden_layers": layers, **shape})
    model = LlamaForCausalLM(config, torch.bfloat16, "cuda")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return model.eval()


def make_engine(accepted_length: float) -> Engine:
    """A step yields so many tokens for each request, as far as it drafts, whatever the drafts are."""
    config = EngineConfig(
        model=SourceConfig("synthetic"),
        speculation=SpeculationConfig(method="draft-model", max_tokens=4),
        cache=CacheConfig(num_blocks=6000, prefix_caching=False),
        scheduler=SchedulerConfig(max_concurrency=STREAMS, max_batched_tokens=256),
        device="cuda",
        policy=Policy(num_speculative_tokens=4),
    )
    draft = synthetic(1, hidden_size=1024, intermediate_size=2816, num_attention_heads=16)
    engine = Engine(config, synthetic(8), draft, max_model_len=4096)
    engine.force_accepted_length(accepted_length)
    engine.capture(lambda line: None)
    return engine


def loops(engine: Engine) -> set[Draft]:
    return {key for key in engine._runner._graphs._graphs if isinstance(key, Draft)}


def serve(engine: Engine, streams: int, tokens: int) -> list[float]:
    """The draft length in force at each step in which all of them decode."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for index in range(streams):
        engine.add(AddRequest(f"{time.monotonic()} {index}", tuple(range(5, 69)), params))
    lengths = []
    while engine.has_work:
        stats = engine.step().stats
        if stats.running == streams and engine._reflex.effective_tokens is not None:
            lengths.append(stats.effective_tokens)
    return lengths


@pytest.fixture(scope="module")
def agreeing() -> Engine:
    return make_engine(5.0)


def test_measured_steps_are_sane_and_rise_with_tokens_and_context(agreeing):
    runner = agreeing._runner
    plain = [runner.measure(StepShape(tokens, tokens, tokens)) for tokens in (1, 32, 128, 256)]
    assert 1e-4 < plain[0] < 0.02
    assert all(later > 0.9 * earlier for earlier, later in pairwise(plain))
    assert plain[-1] > 1.05 * plain[0]
    assert runner.measure(StepShape(16, 16, 16 * 2048)) > 1.02 * runner.measure(StepShape(16, 16, 16))
    drafts = [runner.measure(StepShape(5, 5, 5, 1, turns, 1)) for turns in (1, 4)]
    assert plain[0] < drafts[0] < drafts[1]


def test_the_table_that_it_starts_from_says_what_was_measured(agreeing):
    table = agreeing._reflex.table
    for shape in table.calibration(16, 1024):
        assert table.seconds(shape) == pytest.approx(agreeing._runner.measure(shape), rel=0.2), shape


def test_calibration_at_start_takes_about_a_second(agreeing):
    calibration = Calibration(agreeing._reflex.table, agreeing._runner, 6000 * 16, 4096)
    begin = time.monotonic()
    calibration.begin()
    assert time.monotonic() - begin < 2.0


def test_one_stream_whose_drafts_stand_drafts_with_loops_that_were_captured(agreeing):
    before = loops(agreeing)
    lengths = serve(agreeing, 1, 600)
    assert loops(agreeing) == before
    assert np.mean(lengths[len(lengths) // 3 :]) > 2.0
    assert agreeing.stats().speedup > 1.2


def test_when_all_is_captured_all_is_measured_and_shorter_loops_are_there(agreeing):
    while agreeing.idle():
        pass
    assert {loop.length for loop in loops(agreeing)} == {1, 2, 3, 4}
    before = loops(agreeing)
    lengths = serve(agreeing, STREAMS, 200)
    assert loops(agreeing) == before
    assert np.mean(lengths[len(lengths) // 2 :]) > 0.5


def test_many_streams_whose_drafts_never_stand_stop_drafting():
    engine = make_engine(1.0)
    while engine.idle():
        pass
    lengths = serve(engine, STREAMS, 300)
    assert np.mean(lengths[len(lengths) // 2 :]) < 0.1  # probes
    assert engine.stats().speedup == pytest.approx(1.0, abs=0.03)
    step = StepShape(STREAMS, STREAMS, STREAMS * 300)
    assert engine._reflex.table.seconds(step) == pytest.approx(engine._runner.measure(step), rel=0.3)
