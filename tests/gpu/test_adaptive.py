"""On a CUDA device the reflex measures steps, chooses among captured graphs only, and drafts where that pays."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.gpu.marks import ON_A_GPU

from outrider_runtime.config import CacheConfig, EngineConfig, SchedulerConfig, SourceConfig, SpeculationConfig
from outrider_runtime.engine.calibration import Calibration
from outrider_runtime.engine.capture import Draft
from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.models.config import model_config
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.table import Mode
from outrider_runtime.speculation.cost import StepShape
from outrider_runtime.speculation.policy import Policy
from outrider_runtime.speculation.verify import draw_lots

pytestmark = ON_A_GPU

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
# A draft of the target's width: a draft costs a good part of a step, whatever the host's share of that is, and both run
# the same kernels, so that half as many are compiled.
TARGET_LAYERS, DRAFT_LAYERS = 16, 2


def synthetic(layers: int) -> LlamaForCausalLM:
    model = LlamaForCausalLM(model_config({**SHAPE, "num_hidden_layers": layers}), torch.bfloat16, "cuda")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return model.eval()


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Every draft of a step stands, until it is told otherwise."""
    config = EngineConfig(
        model=SourceConfig("synthetic"),
        speculation=SpeculationConfig(method="draft-model", max_tokens=4),
        cache=CacheConfig(num_blocks=6000, prefix_caching=False),
        scheduler=SchedulerConfig(max_concurrency=STREAMS, max_batched_tokens=256),
        device="cuda",
        policy=Policy(num_speculative_tokens=4),
    )
    engine = Engine(config, synthetic(TARGET_LAYERS), synthetic(DRAFT_LAYERS), max_model_len=4096)
    engine.force_accepted_length(5.0)
    engine.capture(lambda line: None)
    return engine


def capture_the_rest(engine: Engine) -> None:
    """That greedy requests need, as all are here: what others need would take half a minute."""
    runner = engine._runner
    runner._uncaptured = [each for each in runner._uncaptured if getattr(each, "mode", Mode.GREEDY) is Mode.GREEDY]
    while engine.idle():
        pass


def force_from_now_on(engine: Engine, accepted_length: float) -> None:
    """In place, for the graphs were captured with these lots."""
    lots = engine._runner._lots
    lots.copy_(draw_lots(accepted_length, len(lots), lots.device))


def prices(engine: Engine, context: int) -> str:
    """Of plain steps and of those that draft one token, all streams running."""
    told = []
    for length in (0, 1):
        tokens = STREAMS * (1 + length)
        shape = StepShape(tokens, tokens, STREAMS * context, STREAMS * length, length, STREAMS * context * length)
        told.append(f"{length} drafts: {1e3 * engine._reflex.table.seconds(shape):.3f} ms by the table")
    return "; ".join(told)


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


def test_measured_steps_are_sane_and_rise_with_tokens_and_context(engine):
    runner = engine._runner
    plain = [runner.measure(StepShape(tokens, tokens, tokens)) for tokens in (1, 32, 128, 256)]
    assert 1e-4 < plain[0] < 0.02
    assert all(later > 0.9 * earlier for earlier, later in pairwise(plain))
    assert plain[-1] > 1.05 * plain[0]
    assert runner.measure(StepShape(16, 16, 16 * 2048)) > 1.02 * runner.measure(StepShape(16, 16, 16))
    drafts = [runner.measure(StepShape(5, 5, 5, 1, turns, 1)) for turns in (1, 4)]
    assert plain[0] < drafts[0] < drafts[1]


def test_the_table_that_it_starts_from_says_what_was_measured(engine):
    table = engine._reflex.table
    for shape in table.calibration(16, 1024):
        assert table.seconds(shape) == pytest.approx(engine._runner.measure(shape), rel=0.2), shape


def test_calibration_at_start_takes_about_a_second(engine):
    calibration = Calibration(engine._reflex.table, engine._runner, 6000 * 16, 4096)
    begin = time.monotonic()
    calibration.begin()
    assert time.monotonic() - begin < 2.0


def test_one_stream_whose_drafts_stand_drafts_with_loops_that_were_captured(engine):
    before = loops(engine)
    lengths = serve(engine, 1, 600)
    assert loops(engine) == before
    assert np.mean(lengths[len(lengths) // 3 :]) > 2.0
    assert engine.stats().speedup > 1.2


def test_when_all_is_captured_all_is_measured_and_shorter_loops_are_there(engine):
    capture_the_rest(engine)
    assert {loop.length for loop in loops(engine)} == {1, 2, 3, 4}
    before = loops(engine)
    lengths = serve(engine, STREAMS, 200)
    assert loops(engine) == before
    assert np.mean(lengths[len(lengths) // 2 :]) > 0.5, prices(engine, 200)


def test_many_streams_whose_drafts_stand_no_more_stop_drafting(engine):
    tokens = 2000  # a few seconds, over which the speed-up is averaged
    capture_the_rest(engine)
    force_from_now_on(engine, 1.0)
    lengths = serve(engine, STREAMS, tokens)
    assert np.mean(lengths[len(lengths) // 2 :]) < 0.1, prices(engine, tokens)
    assert engine.stats().speedup == pytest.approx(1.0, abs=0.05)
    step = StepShape(STREAMS, STREAMS, STREAMS * tokens)
    assert engine._reflex.table.seconds(step) == pytest.approx(engine._runner.measure(step), rel=0.3)
