"""The kernels draw the tokens that the pipeline in torch draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton import jit
from triton import language as tl

from outrider_runtime.kernels import sampling
from outrider_runtime.sampling import pipeline, sampler
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.table import Layout, Mode, SamplingTable

EOS = (2,)
WIDTH = 40
PLAIN = SamplingParams(max_tokens=10)
GREEDY = replace(PLAIN, temperature=0.0)
KINDS = {
    "greedy": GREEDY,
    "noise": PLAIN,
    "warm": replace(PLAIN, temperature=1.7),
    "coldest": replace(PLAIN, temperature=1e-9),
    "top-k": replace(PLAIN, top_k=4),
    "top-k of more than there are": replace(PLAIN, top_k=10_000),
    "top-p": replace(PLAIN, top_p=0.7),
    "top-p of nothing": replace(PLAIN, top_p=0.0),
    "min-p": replace(PLAIN, min_p=0.2),
    "all three": replace(PLAIN, top_k=7, top_p=0.9, min_p=0.05, temperature=1.5),
    "penalties": replace(PLAIN, frequency_penalty=0.7, presence_penalty=-0.5, repetition_penalty=1.4),
    "greedy penalties": replace(GREEDY, frequency_penalty=2.0, repetition_penalty=1.4),
    "bias": replace(PLAIN, logit_bias=((3, 5.0), (0, -100.0), (7, 1.25), (100_000, 9.0)), top_k=3),
    "early": replace(GREEDY, min_tokens=30, stop_token_ids=(3, 4, 100_000)),
    "bad words": replace(PLAIN, bad_words=((5,), (6, 7), (1, 2, 3), (0, 0), (100_000,)), top_p=0.9),
}
LAYOUT = Layout(bias=5, ends=4, words=6, word_length=3)


def setting(vocab: int, kinds: list[SamplingParams]) -> tuple[SamplingTable, torch.Tensor, torch.Tensor]:
    """A table with a slot for each of `kinds`, in reverse; the slot and position of a row of each."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(min(vocab, 9), (len(kinds), WIDTH), generator=generator, dtype=torch.int32)
    table = SamplingTable(texts, EOS, LAYOUT)
    slots = torch.arange(len(kinds) - 1, -1, -1, dtype=torch.int32)
    for slot, params in zip(slots.tolist(), kinds, strict=True):
        table.write(slot, params, slot - (slot << 40), 4 + slot % 3)
    return table, slots, torch.randint(8, WIDTH, (len(kinds),), generator=generator, dtype=torch.int32)


def logits_of(rows: int, vocab: int) -> torch.Tensor:
    """Many are equal, as bfloat16's are."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2)).mul(6).round().div(2)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(sampling, "PART", 32)
    monkeypatch.setattr(sampling, "TEXT_PROGRAMS", 2)


def test_every_kind_of_request_in_one_batch_over_a_slice_of_the_vocabulary():
    table, slots, positions = setting(64, list(KINDS.values()))
    logits = logits_of(len(slots), 64)[:, :50]  # as a draft has it whose table is padded further than the target's
    before = logits.clone()
    drawn = sampling.draw(logits, slots, positions, table, Mode.FULL)
    assert drawn.dtype == torch.int32
    assert drawn.tolist() == pipeline.draw(logits, slots, positions, table, Mode.FULL).tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whoever_wins_by_a_hair(dtype):
    """Near equals in different parts; where the logits are next to nothing, the noise decides."""
    kinds = [PLAIN, PLAIN, PLAIN, KINDS["warm"], KINDS["coldest"], GREEDY]
    table, slots, positions = setting(50, kinds)
    scales = torch.tensor([0.0, 0.01, 1.0, 50.0, 1.0, 1.0]).unsqueeze(1)
    logits = (logits_of(len(slots), 50) * scales).to(dtype)
    drawn = sampling.draw(logits, slots, positions, table, Mode.NOISE)
    assert drawn.tolist() == pipeline.draw(logits, slots, positions, table, Mode.NOISE).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_go_to_the_lowest_id(dtype):
    table, slots, positions = setting(70, [GREEDY] * 3)
    logits = torch.zeros(3, 70, dtype=dtype)
    logits[1, [40, 45, 69]] = 1.0
    assert sampling.draw(logits, slots, positions, table, Mode.GREEDY).tolist() == [0, 40, 0]


@pytest.mark.parametrize("mode", Mode)
def test_drafts_are_placed_in_their_texts_and_never_past_the_last_column(mode):
    kinds = [GREEDY if mode is Mode.GREEDY else PLAIN, GREEDY]
    token_ids = None if mode is Mode.FULL else torch.arange(50).mul(3).add(5)
    (ours, slots, _), (theirs, *_) = setting(50, kinds), setting(50, kinds)
    before, positions = ours.tokens.clone(), torch.tensor([12, WIDTH], dtype=torch.int32)
    rows = (logits_of(2, 50), slots, positions)
    drawn = sampling.draw(*rows, ours, mode, place=True, token_ids=token_ids)
    assert drawn.tolist() == sampler.draft(*rows, theirs, mode, token_ids).tolist()
    before[slots, [12, WIDTH - 1]] = drawn
    assert torch.equal(ours.tokens, before)
    assert torch.equal(theirs.tokens, before)


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.NOISE])
def test_a_part_of_the_vocabulary_draws_as_if_the_rest_were_banned(mode):
    table, slots, positions = setting(160, [GREEDY] * 3 if mode is Mode.GREEDY else [PLAIN, KINDS["warm"], GREEDY])
    logits, token_ids = logits_of(3, 50), torch.arange(50).mul(3).add(5)
    whole = torch.full((3, 160), -torch.inf).index_copy_(1, token_ids, logits)
    drawn = sampling.draw(logits, slots, positions, table, mode, token_ids=token_ids)
    assert drawn.tolist() == pipeline.draw(whole, slots, positions, table, mode).tolist()


def test_rows_are_worked_on_in_chunks_and_do_not_depend_on_each_other(monkeypatch):
    table, slots, positions = setting(30, [KINDS["all three"], KINDS["penalties"], KINDS["bad words"]])
    logits = logits_of(len(slots), 30)
    together = sampling.draw(logits, slots, positions, table, Mode.FULL)
    monkeypatch.setattr(sampling, "AT_ONCE", 60)
    backwards = sampling.draw(logits.flip(0), slots.flip(0), positions.flip(0), table, Mode.FULL)
    assert torch.equal(backwards.flip(0), together)


def test_noise_in_single_precision_is_off_by_less_than_the_margin_allows():
    """All the words there are at either end, and some between."""
    edge = torch.arange(1 << 12)
    middle = torch.randint(1 << 32, (5 << 12,), generator=torch.Generator().manual_seed(0))
    words = torch.cat((edge, (1 << 32) - 1 - edge, (1 << 28) + edge, middle))
    exact, nearly = torch.empty(len(words)), torch.empty(len(words))
    _noise[(1,)](words, exact, nearly, BLOCK=len(words))
    expected = -(-(-(words.double() + 0.5) * 2.0**-32).log1p()).log()
    assert torch.equal(exact, expected.float())
    assert (nearly - expected).abs().max() < 1e-5


@jit
def _noise(words, exact, nearly, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    word = tl.load(words + at).to(tl.uint32)
    tl.store(exact + at, sampling._gumbel(word))
    tl.store(nearly + at, sampling._nearly_gumbel(word))
