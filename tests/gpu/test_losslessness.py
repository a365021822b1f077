"""On a CUDA device no method changes a text but where rounding decides: in float32 near ties, in bfloat16 what its own
rounding of the logits may put in another order."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.gpu.marks import ON_A_GPU
from tests.runtime.engine.driver import assert_all_free
from tests.runtime.losslessness.asked import Asked
from tests.runtime.losslessness.compare import compared
from tests.runtime.losslessness.plain import (
    everything,
    generate,
    logits_of,
    plain,
    reference,
    scored,
    speaking,
    target,
)
from tests.runtime.losslessness.restless import Restless
from tests.runtime.methods import METHODS

from outrider_runtime.offline import Completion

pytestmark = ON_A_GPU

DEVICE = "cuda"
SETTING = {"concurrency": 8, "budget": 32, "blocks": 60}  # few widths, so few graphs
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("method", METHODS)
def test_in_float32_only_near_ties_differ(method, record_property):
    engine = speaking(method, Restless, target=target(torch.float32, DEVICE), **SETTING)
    verdict = compared(everything(), generate(engine, everything()), plain(), rounded=True)
    assert not verdict.faults
    record_property("near ties in float32", (verdict.near, verdict.tokens))
    assert_all_free(engine)


@cache
def halved() -> tuple[tuple[Asked, ...], tuple[Completion, ...]]:
    """Those that no top-k, top-p or min-p cuts (rounding may move a token across these whatever the scores are), and
    what plain decoding makes of them in bfloat16."""
    requests = tuple(
        each
        for each in everything()
        if (each.params.top_k, each.params.top_p, each.params.min_p) == (0, 1, 0) and not each.params.stop
    )
    engine = speaking("no speculation", target=target(HALF, DEVICE), **SETTING)
    return requests, tuple(generate(engine, requests))


@cache
def rounding() -> float:
    """The most that bfloat16 moves a logit of these texts, by transformers' forward in both types."""
    rounded, whole = reference(HALF, exact=False), reference(HALF)
    worst = 0.0
    for request, completion in zip(*halved(), strict=True):
        exact = logits_of(request, completion.token_ids, whole)
        worst = max(worst, float((logits_of(request, completion.token_ids, rounded) - exact).abs().max()))
    return worst


def beyond_rounding(requests: tuple[Asked, ...], found: list[Completion], texts: tuple[Completion, ...]) -> list[str]:
    """Requests whose text turns off where the two tokens' scores are too far apart for rounding to exchange them."""
    faults = []
    for request, one, other in zip(requests, found, texts, strict=True):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
        at = next((at for at, (a, b) in pairs if a != b), None)
        if at is None:
            continue
        scores = scored(request, one.token_ids[: at + 1], reference(HALF))[-1]
        apart = abs(float(scores[one.token_ids[at]] - scores[other.token_ids[at]]))
        params = request.params
        allowed = 2 * rounding() * max(1, params.repetition_penalty) / min(params.temperature or 1, 1)
        if apart > allowed:
            faults.append(f"{request.name}: token {at}, {apart:.3g} apart, rounding explains {allowed:.3g}")
    return faults


@pytest.mark.parametrize("method", METHODS)
def test_in_bfloat16_a_text_turns_off_only_where_rounding_decides(method):
    requests, texts = halved()
    engine = speaking(method, target=target(HALF, DEVICE), **SETTING)
    found = generate(engine, requests)
    assert not beyond_rounding(requests, found, texts)
    same = sum(one.token_ids == other.token_ids for one, other in zip(found, texts, strict=True))
    assert same > len(texts) / 2


def test_a_verifier_that_accepts_what_it_should_not_is_found_out():
    requests, texts = halved()
    engine = speaking("random draft", target=target(HALF, DEVICE), **SETTING)
    engine.force_accepted_length(3.0)
    assert len(beyond_rounding(requests, generate(engine, requests), texts)) > len(texts) / 4
