"""Models that transformers' code runs over our attention have transformers' logits, and speculate like any other."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.runtime.engine.driver import EOS, MAX_MODEL_LEN, assert_all_free, make_engine, run
from tests.runtime.models.steps import assert_logits_are_those_of
from tests.runtime.tiny import reference_model

from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.errors import Refusal
from outrider_runtime.models.checkpoint import Checkpoint
from outrider_runtime.models.config import GENERIC_ARCHITECTURES, model_config
from outrider_runtime.models.registry import make_model
from outrider_runtime.models.transfer import fill
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.pipeline import Row, sample

# Some have no windows and pass over theirs; with 4 layers, those that mix windows have both kinds
SHAPE = {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 6, "sliding_window_pattern": 2}
WINDOWS = {"Gemma2": 2, "Gemma3": 2, "Phi3": 4, "Starcoder2": 4, "Olmo3": 3, "Cohere2": 2, "Exaone4": 2, "Ministral": 4}


@cache
def reference(architecture):
    return reference_model(architecture, **SHAPE)


def generic(model, folder):
    """As it comes from a folder that transformers has written."""
    model.save_pretrained(folder)
    config = model_config(model.config.to_dict())
    module = make_model(config, torch.float32, "cpu")
    fill(module.shards(), Checkpoint("m", folder, config, folder).weights(), "m", lambda line: None)
    return module


@pytest.mark.parametrize("architecture", GENERIC_ARCHITECTURES)
def test_logits_are_those_of_transformers(architecture, tmp_path):
    module = generic(reference(architecture), tmp_path)
    windowed = WINDOWS.get(architecture.removesuffix("ForCausalLM"), 0)
    assert module.attention_shape.sliding_window == (6 if windowed else None)
    assert module.attention_shape.full_layers == (0 < windowed < 4)
    assert_logits_are_those_of(reference(architecture), module)


@cache
def naive(architecture, prompt, params):
    model, tokens = reference(architecture), list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens and len(tokens) < MAX_MODEL_LEN:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        tokens.append(int(sample(logits, [Row(params, params.seed or 0, tokens, len(prompt))], (EOS,))))
        if tokens[-1] == EOS:
            break
    return tuple(tokens[len(prompt) :])


PROMPTS = [(4,), (11, 12, 13, 14, 15) * 4, tuple(range(10, 40))]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0), SamplingParams(max_tokens=12, seed=1, top_p=0.9)


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("GemmaForCausalLM", "n-gram"),
        ("Gemma2ForCausalLM", "no speculation"),
        ("Gemma2ForCausalLM", "another draft"),
        ("GPTNeoXForCausalLM", "no speculation"),
        ("GPTNeoXForCausalLM", "another draft"),
    ],
)
def test_a_text_is_what_the_naive_loop_writes_by_every_method(architecture, method, tmp_path):
    target, draft = generic(reference(architecture), tmp_path / "target"), None
    if method == "another draft":  # of another architecture, which agrees by chance
        draft, method = generic(reference("PhiForCausalLM"), tmp_path / "draft"), "equal draft"
    engine = make_engine(method, target=target, draft=draft, budget=24)
    requests = [
        AddRequest(f"{i}{j}", prompt, params) for i, prompt in enumerate(PROMPTS) for j, params in enumerate(PARAMS)
    ]
    collector = run(engine, requests)
    for request in requests:
        text = collector.tokens(request.request_id)
        assert text == naive(architecture, request.prompt, request.params), request
    assert_all_free(engine)


def test_its_own_copy_drafts_what_it_writes(tmp_path):
    module = generic(reference("Gemma2ForCausalLM"), tmp_path)
    engine = make_engine("equal draft", target=module, draft=module)
    run(engine, [AddRequest("a", PROMPTS[1], PARAMS[0])])
    assert engine.stats().draft_tokens >= 8
    assert engine.stats().accepted_tokens > 0.7 * engine.stats().draft_tokens


@pytest.mark.parametrize(
    ("architecture", "changes", "told"),
    [
        (
            "GemmaForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "GemmaForCausalLM: rope_type dynamic; supported: default, linear, llama3, yarn",
        ),
        ("GemmaForCausalLM", {"vocab_size": "many"}, "GemmaForCausalLM: config.json is not valid: "),
        ("GemmaForCausalLM", {"hidden_act": "gleu"}, "GemmaForCausalLM: config.json is not valid: KeyError: 'gleu'"),
        ("GemmaForCausalLM", {"num_attention_heads": 0}, "config.json is not valid: ZeroDivisionError"),
        ("GemmaForCausalLM", {"quantization_config": {"quant_method": "awq"}}, "quantized by awq"),
        ("Gemma4ForCausalLM", {}, "architecture Gemma4ForCausalLM; supported: LlamaForCausalLM"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(architecture, changes, told):
    config = reference("GemmaForCausalLM").config.to_dict() | {"architectures": [architecture], **changes}
    with pytest.raises(Refusal) as refusal:
        model_config(config)
    assert refusal.value.reason == "UnsupportedModel"
    assert told in refusal.value.message
