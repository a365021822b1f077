"""What is emitted follows the target's distribution exactly, drawn alone and verified behind drafts of any kind; and a
noise or a verifier that is a little wrong is found out."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.runtime.losslessness.broken import TREE_VERIFIERS, VERIFIERS, WORDS
from tests.runtime.losslessness.chain import (
    DRAFT,
    DRAFTERS,
    PROMPT,
    REQUESTS,
    TARGET,
    Chain,
    Tree,
    probabilities,
)
from tests.runtime.sampling.distribution import (
    CASES,
    DRAFTED,
    EOS,
    LOGITS,
    PLAIN,
    TEXT,
    VOCAB,
    expected_distribution,
    follows,
)

from outrider_runtime.sampling import noise
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.pipeline import Row
from outrider_runtime.sampling.sampler import sample
from outrider_runtime.sampling.table import Layout, SamplingTable, mode_of
from outrider_runtime.speculation import verify

DRAWS = 100_000
WAYS = {
    "softmax": PLAIN,
    "top-k, then penalties": replace(PLAIN, top_k=4, frequency_penalty=0.7, presence_penalty=0.2, temperature=1.3),
}


def draws(params: SamplingParams) -> list[int]:
    """How often each token is drawn behind TEXT and DRAFTED, with as many seeds."""
    text = torch.tensor([[*TEXT, *DRAFTED]], dtype=torch.int32)
    table = SamplingTable(text, EOS, Layout(bias=3, ends=3, words=5, word_length=7))
    table.write(0, params, 0, 3)
    table.tokens, table.rows = text.expand(DRAWS, -1), table.rows.repeat(DRAWS, 1)
    table.rows.view(torch.int64)[:, 0] = torch.arange(DRAWS)
    slots = torch.arange(DRAWS, dtype=torch.int32)
    positions = torch.full_like(slots, text.shape[1])
    drawn = sample(torch.tensor(LOGITS).expand(DRAWS, -1), slots, positions, table, mode_of(params))
    return torch.bincount(drawn, minlength=VOCAB).tolist()


def expected(params: SamplingParams) -> list[float]:
    return expected_distribution(LOGITS, Row(params, 0, TEXT, 3, DRAFTED))


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution(case):
    assert follows(draws(CASES[case]), expected(CASES[case]))


@cache
def written(way: str, drafter: str) -> Chain:
    return Chain(WAYS[way], DRAFTERS[drafter])


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("way", WAYS)
def test_texts_follow_the_distribution_and_are_the_seeds_whatever_was_drafted(way, drafter):
    chain = written(way, drafter)
    assert follows(chain.counts(), probabilities(WAYS[way]))
    assert torch.equal(chain.texts, written(way, "no draft").texts)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_broken_verifier_is_found_out(verifier, monkeypatch):
    monkeypatch.setattr(verify, "walk", VERIFIERS[verifier])
    drafter = DRAFTERS["drafts with the target's noise"]
    assert not follows(Chain(PLAIN, drafter).counts(), probabilities(PLAIN))


def test_texts_out_of_trees_follow_the_distribution_and_are_the_seeds():
    tree = Tree(PLAIN)
    assert follows(tree.counts(), probabilities(PLAIN))
    assert torch.equal(tree.texts, written("softmax", "no draft").texts)
    assert tree.first > written("softmax", "drafts with the target's noise").first


@pytest.mark.parametrize("verifier", TREE_VERIFIERS)
def test_a_broken_verifier_of_trees_is_found_out(verifier, monkeypatch):
    monkeypatch.setattr(verify, "walk_tree", TREE_VERIFIERS[verifier])
    assert not follows(Tree(PLAIN).counts(), probabilities(PLAIN))


@pytest.mark.parametrize("words", WORDS)
def test_a_biased_noise_is_found_out(words, monkeypatch):
    monkeypatch.setattr(noise, "random_words", WORDS[words])
    assert not follows(Chain(PLAIN, None).counts(), probabilities(PLAIN))


def test_a_distribution_that_is_off_by_a_hundredth_is_found_out():
    observed, probability = draws(PLAIN), expected(PLAIN)
    assert follows(observed, probability)
    off = [probability[0] + 0.01, probability[1] - 0.01, *probability[2:]]
    assert not follows(observed, off)
    assert not follows([1, 9], [0.0, 1.0])


def test_drafts_stand_as_often_as_the_coupling_by_noise_says():
    """Exactly sum_x 1 / sum_y max(p_y / p_x, q_y / q_x): between (1 - d) / (1 + d) and 1 - d, the best of all
    couplings, for the total variation d (Daliri et al., arXiv 2408.07978). Drafts with noise of their own: sum pq."""
    p, q = (logits[PROMPT[-1]].double().softmax(-1) for logits in (TARGET, DRAFT))
    ratios = torch.maximum(p.unsqueeze(0) / p.unsqueeze(1), q.unsqueeze(0) / q.unsqueeze(1))
    shared, own, best = float((1 / ratios.sum(1)).sum()), float((p * q).sum()), float(torch.minimum(p, q).sum())
    assert best / (2 - best) <= shared <= best
    for drafter, rate in (("the target's noise", shared), ("noise of their own", own)):
        stood = written("softmax", f"drafts with {drafter}").first
        assert abs(stood - rate) < 4 * math.sqrt(rate * (1 - rate) / REQUESTS)
    assert own < shared
