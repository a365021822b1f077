"""On a CUDA device: weights arrive whole, and models have transformers' logits, in float32 and as bfloat16 rounds."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from tests.gpu.marks import ON_A_GPU
from tests.runtime.engine.driver import assert_all_free, make_engine, run
from tests.runtime.models.steps import CUTS, SHARED, TEXTS, assert_logits_are_those_of, in_steps
from tests.runtime.models.test_generic import PARAMS, PROMPTS, SHAPE, naive
from tests.runtime.tiny import reference_model

from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.models import transfer
from outrider_runtime.models.checkpoint import Checkpoint
from outrider_runtime.models.config import model_config
from outrider_runtime.models.registry import make_model
from outrider_runtime.models.weights import SafetensorsWeights

pytestmark = ON_A_GPU

# Kernels are compiled for each kind of heads: few kinds
MODELS = {
    "GPTNeoXForCausalLM": SHAPE,
    "Gemma2ForCausalLM": SHAPE,
    "Qwen3ForCausalLM": {"head_dim": 96, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
}


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on_device(reference, folder, dtype=torch.float32):
    reference.save_pretrained(folder)
    config = model_config(reference.config.to_dict())
    module = make_model(config, dtype, "cuda")
    transfer.fill(module.shards(), Checkpoint("m", folder, config, folder).weights(), "m", lambda line: None)
    return module.eval()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_weights_arrive_whole_and_in_the_dtype_asked_for(tmp_path, monkeypatch, stored, wanted):
    monkeypatch.setattr(transfer, "PIECE", 1 << 12)  # many for each thread and buffer
    tensors = {str(i): torch.randn(1000 + i, 37).to(stored) for i in range(20)}
    save_file(tensors, tmp_path / "model.safetensors")
    shards = {
        name: torch.full(tensor.shape, torch.nan, dtype=wanted, device="cuda") for name, tensor in tensors.items()
    }
    transfer.fill(shards, SafetensorsWeights({tmp_path / "model.safetensors": None}), "m", lambda line: None)
    assert all(torch.equal(shards[name].cpu(), tensor.to(wanted)) for name, tensor in tensors.items())


@pytest.mark.parametrize("architecture", MODELS)
def test_logits_are_those_of_transformers(architecture, tmp_path):
    reference = reference_model(architecture, **MODELS[architecture])
    assert_logits_are_those_of(reference, on_device(reference, tmp_path))


@pytest.mark.parametrize("architecture", MODELS)
def test_in_bfloat16_logits_are_as_near_as_those_of_transformers(architecture, tmp_path):
    reference = reference_model(architecture, **MODELS[architecture])
    chunked = in_steps(on_device(reference, tmp_path, torch.bfloat16), TEXTS, CUTS, SHARED)
    with torch.no_grad():
        exact = [reference(torch.tensor([text]), use_cache=False).logits[0] for text in TEXTS]
        reference.to(torch.bfloat16)
        theirs = [reference(torch.tensor([text]), use_cache=False).logits[0] for text in TEXTS]
    for expected, near, ours in zip(exact, theirs, chunked, strict=True):
        bound = 2 * (near - expected).norm() / expected.norm() + 0.01
        expected = expected[-len(ours) :]
        assert (ours - expected).norm() / expected.norm() < bound


@pytest.mark.parametrize("architecture", ["GPTNeoXForCausalLM", "Gemma2ForCausalLM"])
def test_transformers_code_runs_in_graphs_and_drafts(architecture, tmp_path):
    module = on_device(reference_model(architecture, **SHAPE), tmp_path)
    engine = make_engine("equal draft", target=module, draft=module, budget=24)
    requests = [AddRequest(f"{i}", prompt, PARAMS[i % 2]) for i, prompt in enumerate(PROMPTS)]
    collector = run(engine, requests)
    for request in requests:
        assert collector.tokens(request.request_id) == naive(architecture, request.prompt, request.params), request
    assert_all_free(engine)
