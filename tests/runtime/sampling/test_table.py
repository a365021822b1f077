"""By slot, on the device, the same tokens are drawn as from rows written out for one step."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_runtime.sampling.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from outrider_runtime.sampling.pipeline import Row
from outrider_runtime.sampling.pipeline import sample as sample_rows
from outrider_runtime.sampling.sampler import sample
from outrider_runtime.sampling.table import Mode, SamplingTable, mode_of

VOCAB, WIDTH, SLOTS = 12, 16, 4
EOS = (2,)
PLAIN = SamplingParams(max_tokens=10)
GREEDY = replace(PLAIN, temperature=0.0)

token = st.integers(0, VOCAB - 1)
params_of_any_kind = st.builds(
    SamplingParams,
    max_tokens=st.just(10),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([1.0, 0.8, 0.0]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    logit_bias=st.dictionaries(token, st.floats(-3, 3, width=32), max_size=3).map(lambda bias: tuple(bias.items())),
    bad_words=st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    stop_token_ids=st.lists(token, max_size=2).map(tuple),
    min_tokens=st.sampled_from([0, 4]),
    ignore_eos=st.booleans(),
)
rows_of_any_kind = st.builds(
    Row,
    params=st.one_of(st.sampled_from([GREEDY, PLAIN]), params_of_any_kind),
    seed=st.integers(-(2**70), 2**70),
    tokens=st.lists(token, min_size=2, max_size=9),
    prompt_length=st.integers(1, 2),
)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(rows_of_any_kind, min_size=1, max_size=SLOTS),
    before=st.lists(rows_of_any_kind, min_size=SLOTS, max_size=SLOTS),
    drafts=st.lists(token, min_size=3, max_size=3),
    order=st.permutations(range(SLOTS)),
    more=st.integers(0, 2),
)
def test_a_slot_draws_what_its_row_would(requests, before, drafts, order, more):
    """Whatever was in the slot before, whatever lies behind the text, and for each draft of a verified span."""
    tokens = torch.randint(VOCAB, (SLOTS, WIDTH), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    table = SamplingTable(tokens, EOS)
    for slot, row in enumerate(before):
        table.write(slot, row.params, row.seed, row.prompt_length)
    rows, slots, positions = [], [], []
    for slot, request in zip(order, requests, strict=False):
        table.write(slot, request.params, request.seed, request.prompt_length)
        text = [*request.tokens, *drafts]
        tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        for count in range(len(drafts) + 1):
            rows.append(replace(request, drafted=drafts[:count]))
            slots.append(slot)
            positions.append(rows[-1].position)
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1)).mul(4).round() / 2
    mode = Mode(min(max(mode_of(row.params) for row in rows) + more, Mode.FULL))
    drawn = sample(logits, torch.tensor(slots, dtype=torch.int32), torch.tensor(positions), table, mode)
    assert drawn.dtype == torch.int32
    assert drawn.tolist() == sample_rows(logits, rows, EOS).tolist()


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        (GREEDY, Mode.GREEDY),
        (replace(GREEDY, top_k=3, top_p=0.5, min_p=0.1), Mode.GREEDY),
        (PLAIN, Mode.NOISE),
        (replace(PLAIN, top_k=3), Mode.FULL),
        (replace(PLAIN, top_p=0.9), Mode.FULL),
        (replace(PLAIN, min_p=0.1), Mode.FULL),
        (replace(GREEDY, presence_penalty=0.1), Mode.FULL),
        (replace(GREEDY, frequency_penalty=0.1), Mode.FULL),
        (replace(GREEDY, repetition_penalty=1.1), Mode.FULL),
        (replace(GREEDY, logit_bias=((1, 2.0),)), Mode.FULL),
        (replace(GREEDY, bad_words=((1, 2),)), Mode.FULL),
        (replace(GREEDY, min_tokens=1), Mode.FULL),
    ],
)
def test_a_request_needs_no_more_than(params, mode):
    assert mode_of(params) is mode


def test_a_slot_that_nobody_wrote_is_greedy():
    table = SamplingTable(torch.zeros(2, 4, dtype=torch.int32))
    logits = torch.tensor([[0.0, 3.0, 3.0]])
    for mode in Mode:
        assert sample(logits, torch.tensor([1]), torch.tensor([1]), table, mode).tolist() == [1]


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("logit_bias", replace(PLAIN, logit_bias=tuple((token, 1.0) for token in range(MAX_LOGIT_BIAS + 1)))),
        ("bad_words", replace(PLAIN, bad_words=((1,),) * (MAX_BAD_WORDS + 1))),
        ("longest of bad_words", replace(PLAIN, bad_words=((1,) * (MAX_BAD_WORD_TOKENS + 1),))),
        ("stop_token_ids", replace(PLAIN, stop_token_ids=tuple(range(3, MAX_STOP_TOKEN_IDS + 4)))),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field, params):
    table = SamplingTable(torch.zeros(1, 4, dtype=torch.int32), EOS)
    with pytest.raises(ValueError, match=field):
        table.write(0, params, 0, 1)


def test_parameters_travel_between_processes():
    params = replace(PLAIN, logit_bias=((1, 2.0),), bad_words=((1, 2), (3,)), min_p=0.1, logprobs=3)
    assert pickle.loads(pickle.dumps(params)) == params
