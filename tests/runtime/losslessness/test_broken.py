"""The comparison of texts finds a broken verifier, a forgotten cut and a wrong token, and lets near ties pass alone; a
shadow of the draft's state finds what is not its text's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.runtime.losslessness import plain as oracle
from tests.runtime.losslessness.asked import GREEDY, Asked
from tests.runtime.losslessness.broken import STATES, VERIFIERS
from tests.runtime.losslessness.compare import compared
from tests.runtime.losslessness.events import happenings
from tests.runtime.losslessness.plain import everything, generate, plain, speaking, target
from tests.runtime.losslessness.shadow import Shadow
from tests.runtime.tiny import reference_model

from outrider_runtime.engine.request import Request
from outrider_runtime.offline import Completion
from outrider_runtime.speculation import verify

HERE = slice(14, 32)  # of everything(): some that end by a token among them


def faults() -> list[str]:
    engine = speaking("worse draft", target=target(torch.float64), concurrency=16, blocks=400)
    return compared(everything()[HERE], generate(engine, everything()[HERE]), plain()[HERE]).faults


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_broken_verifier_is_found_out_and_the_requests_are_named(verifier, monkeypatch):
    expected = plain()  # with the right one
    monkeypatch.setattr(verify, "walk", VERIFIERS[verifier])
    found = faults()
    assert len(expected) > len(found) > 6
    assert any(fault.startswith("sampled, penalties, prompt ") and ", plain decoding " in fault for fault in found)


def test_a_forgotten_cut_is_found_out(monkeypatch):
    assert not faults()
    monkeypatch.setattr(Request, "cut", lambda self, tokens, *rest: (list(tokens), _reason(self, tokens)))
    assert faults()


def _reason(request: Request, tokens: list[int]) -> str | None:
    return "length" if request.generated + len(tokens) >= request.params.max_tokens else None


@pytest.mark.parametrize("fault", STATES)
def test_a_draft_whose_state_is_not_its_texts_is_found_out(fault, monkeypatch):
    method, owner, name, broken = STATES[fault]
    shadow = Shadow(method)

    def several() -> None:
        for number in range(5):
            happenings(str(number), method, shadow)

    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError, match="draft"):
        several()


def test_rounding_excuses_near_ties_and_nothing_else(monkeypatch):
    request = Asked("it", (5, 6, 7, 8), replace(GREEDY, max_tokens=4))
    model = reference_model().double()
    twin = 30
    monkeypatch.setattr(oracle, "reference", lambda: model)
    ids = []
    for _ in range(4):
        ids.append(int(oracle.logits_of(request, [*ids, 0])[-1].argmax()))
    right, wrong = (Completion("", [*ids[:3], last], "length") for last in (ids[3], twin))
    for distance, near in ((1e-7, 1), (1e-3, 0)):
        with torch.no_grad():  # the last token's twin is next to as likely wherever it is
            model.lm_head.weight[twin] = model.lm_head.weight[ids[3]] * (1 - distance)
        verdict = compared([request], [wrong], [right], rounded=True)
        assert (verdict.tokens, verdict.near, len(verdict.faults)) == (4, near, 1 - near), verdict.faults
    assert compared([request], [wrong], [right]).faults
    assert not compared([request], [right], [right], rounded=True).faults
