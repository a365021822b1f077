"""On a CUDA device the kernels draw what the pipeline in torch draws, over real vocabularies and inside graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.marks import ON_A_GPU

from outrider_runtime.sampling import pipeline
from outrider_runtime.sampling.logprobs import logprobs
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.sampler import sample
from outrider_runtime.sampling.table import Mode, SamplingTable
from outrider_runtime.speculation.ngram import match_suffixes

if torch.cuda.is_available():
    from outrider_runtime.kernels.ngram import continuations

pytestmark = ON_A_GPU

VOCAB = 128_256
WIDTH = 2_000
EOS = (128_001, 128_008, 128_009)
PLAIN = SamplingParams(max_tokens=10)
GREEDY = replace(PLAIN, temperature=0.0)
KINDS = {
    "greedy": GREEDY,
    "noise": PLAIN,
    "warm": replace(PLAIN, temperature=1.7),
    "coldest": replace(PLAIN, temperature=1e-9),
    "top-k": replace(PLAIN, top_k=50),
    "top-k of one": replace(PLAIN, top_k=1),
    "top-k of many": replace(PLAIN, top_k=50_000),
    "top-p": replace(PLAIN, top_p=0.9),
    "top-p of nothing": replace(PLAIN, top_p=0.0),
    "top-p of nearly all": replace(PLAIN, top_p=0.999),
    "cold top-p": replace(PLAIN, top_p=0.9, temperature=1e-6),
    "min-p": replace(PLAIN, min_p=0.05),
    "all three": replace(PLAIN, top_k=200, top_p=0.95, min_p=0.01, temperature=1.5),
    "penalties": replace(PLAIN, frequency_penalty=0.7, presence_penalty=-0.5, repetition_penalty=1.4, top_k=40),
    "greedy penalties": replace(GREEDY, frequency_penalty=2.0, repetition_penalty=1.4),
    "bias": replace(PLAIN, logit_bias=tuple((token * 97, 8.0 - token / 40) for token in range(1_000)), top_p=0.8),
    "early": replace(GREEDY, min_tokens=3_000, logit_bias=((EOS[0], 100.0), (3, 99.0)), stop_token_ids=(3, 4)),
    "bad words": replace(PLAIN, bad_words=(*((token,) for token in range(64)), (70, 71), (72, 72)), top_p=0.9),
}
ROWS_EACH = 6


def setting(kinds: list[SamplingParams]) -> tuple[SamplingTable, torch.Tensor, torch.Tensor]:
    """A slot for each of `kinds`, in reverse, and the slots and positions of some rows of each."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(75, (len(kinds) + 1, WIDTH), generator=generator, dtype=torch.int32)
    table = SamplingTable(texts.cuda(), EOS)
    slots = torch.arange(len(kinds) - 1, -1, -1, dtype=torch.int32)
    for slot, params in zip(slots.tolist(), kinds, strict=True):
        table.write(slot, params, slot * 7919 - (slot << 45), 20)
    lengths = torch.randint(30, WIDTH - ROWS_EACH, (len(kinds), 1), generator=generator, dtype=torch.int32)
    positions = (lengths + torch.arange(ROWS_EACH, dtype=torch.int32)).flatten()
    return table, slots.repeat_interleave(ROWS_EACH).cuda(), positions.cuda()


def logits_of(rows: int, dtype: torch.dtype, vocab: int = VOCAB) -> torch.Tensor:
    """A broad mass, and a few hundred candidates above it."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 2
    logits[:, ::331] += 8
    return logits.to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
def test_every_kind_of_request_draws_what_the_pipeline_draws(mode, dtype):
    table, slots, positions = setting(list(KINDS.values()))
    logits = logits_of(len(slots), dtype)
    before = logits.clone()
    drawn = sample(logits, slots, positions, table, mode)
    assert drawn.tolist() == pipeline.draw(logits, slots, positions, table, mode).tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0])
def test_the_noise_decides_as_in_double_precision(scale):
    """5,120 draws, in which near equals are everywhere."""
    table, slots, positions = setting([PLAIN] * 8)
    slots = slots[::ROWS_EACH].repeat(160)
    positions = torch.arange(len(slots), device="cuda", dtype=torch.int32)
    logits = logits_of(1, torch.bfloat16).mul(scale).expand(len(slots), -1)
    for start in (0, 40_000, 80_000, 120_000):
        drawn = sample(logits, slots, positions + start, table, Mode.NOISE)
        assert torch.equal(drawn, pipeline.draw(logits, slots, positions + start, table, Mode.NOISE))


@pytest.mark.parametrize("vocab", [31, 2_048, 2_049, 151_936])
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
def test_a_slice_of_a_vocabulary_of_any_size(mode, vocab):
    table, slots, positions = setting([GREEDY, PLAIN, KINDS["all three"], KINDS["early"], KINDS["penalties"]])
    logits = logits_of(len(slots), torch.bfloat16, vocab + 13)[:, :vocab]
    drawn = sample(logits, slots, positions, table, mode)
    assert drawn.tolist() == pipeline.draw(logits, slots, positions, table, mode).tolist()


def test_equals_go_to_the_lowest_id():
    table, slots, positions = setting([GREEDY])
    logits = torch.zeros(ROWS_EACH, VOCAB, device="cuda", dtype=torch.bfloat16)
    logits[1, [70_000, 70_003, 127_000]] = 1
    for mode in Mode:
        assert sample(logits, slots, positions, table, mode).tolist() == [0, 70_000, 0, 0, 0, 0]


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
def test_a_captured_graph_follows_its_inputs_and_no_row_depends_on_others(mode):
    """160 rows: two chunks of what is worked on in full."""
    kinds = list(KINDS.values())
    table, slots, positions = setting(kinds)
    slots, positions = slots.repeat(2)[:160].contiguous(), positions.repeat(2)[:160].contiguous()
    logits = logits_of(160, torch.bfloat16)
    sample(logits, slots, positions, table, mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sample(logits, slots, positions, table, mode)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(3)).cuda()
    for _ in range(2):
        graph.replay()
        replayed = drawn.clone()
        assert torch.equal(sample(logits[order], slots[order], positions[order], table, mode), replayed[order])
        for row in (0, 17, 159):
            one = slice(row, row + 1)
            assert sample(logits[one], slots[one], positions[one], table, mode).item() == replayed[row]
        positions -= 25
        logits.copy_(logits.flip(1))
        table.write(0, PLAIN, 3, 10)


def test_logprobs_are_those_of_the_log_softmax_inside_a_graph():
    logits = logits_of(80, torch.bfloat16)
    tokens = logits.argmax(-1).to(torch.int32)
    logprobs(logits, tokens, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        told = logprobs(logits, tokens, 5)
    graph.replay()
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(told.chosen.double(), expected.amax(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(told.top.double(), expected.topk(5).values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [100, 9_000])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 4), (3, 6)])
def test_n_grams_are_matched_as_in_torch_inside_a_graph(width, shortest, longest):
    generator = torch.Generator().manual_seed(width)
    kinds = torch.tensor([2, 5, 40, 1_000, 100_000]).repeat(7)
    texts = (torch.rand(len(kinds), width, generator=generator) * kinds.unsqueeze(1)).to("cuda", torch.int32)
    slots = torch.randperm(len(kinds), generator=generator).to("cuda", torch.int32)
    lengths = torch.randint(1, width + 1, (len(kinds),), generator=generator, dtype=torch.int32).cuda()
    continuations(texts, slots, lengths, 5, shortest, longest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts, found = continuations(texts, slots, lengths, 5, shortest, longest)
    for _ in range(2):
        graph.replay()
        own = texts[slots].long()
        starts = match_suffixes(own, lengths.long(), shortest, longest)
        followed = starts.unsqueeze(1) + torch.arange(5, device="cuda") % (lengths - starts).unsqueeze(1)
        assert torch.equal(found, starts > 0)
        assert torch.equal(drafts[found].long(), own.gather(1, followed)[found])
        lengths.copy_((lengths - 7).clamp(min=1))
