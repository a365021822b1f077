"""Which drafts can draft for which targets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_runtime.models.pair import mismatch

WORDS = {"a": 0, "b": 1, "c": 2, "<eos>": 3}


@pytest.mark.parametrize(
    ("draft", "target_rows", "draft_rows", "told"),
    [
        (WORDS, 4, 4, ""),
        (WORDS, 8, 16, ""),  # padding of the embedding tables
        ({**WORDS, "<extra>": 4}, 8, 8, ""),  # an id only one of them has
        ({"a": 0, "b": 1}, 4, 4, ""),
        ({**WORDS, "<far>": 9}, 4, 4, ""),  # past the draft's own rows: never emitted
        ({"a": 0, "x": 1, "c": 2, "<eos>": 3}, 4, 4, "token 1 ('b' and 'x')"),
        ({"a": 0, "c": 1, "b": 2, "<eos>": 3}, 4, 4, "token 1 ('b' and 'c'), and on 1 more of 4"),
        ({"a": 0, "b": 1, "c": 2, "</s>": 3}, 4, 4, "token 3 ('<eos>' and '</s>')"),
        ({"z": 7}, 8, 8, "every token: no id is in both"),
        ({"a": 0, "b": 1, "c": 2}, 4, 3, "token 3, which the draft's table of 3 rows lacks"),
    ],
)
def test_two_tokenizers_agree_when_every_id_both_can_emit_is_the_same_token(draft, target_rows, draft_rows, told):
    assert mismatch(WORDS, draft, target_rows, draft_rows) == told


@given(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=30, unique=True), st.integers(0, 5))
def test_a_tokenizer_always_agrees_with_itself_whatever_the_padding(tokens, padding):
    words = {token: id_ for id_, token in enumerate(tokens)}
    assert mismatch(words, words, len(words), len(words) + padding) == ""
    assert mismatch(words, words, len(words) + padding, len(words)) == ""


@given(st.lists(st.text(min_size=1, max_size=3), min_size=2, max_size=30, unique=True), st.data())
def test_two_swapped_tokens_are_always_noticed(tokens, data):
    i, j = data.draw(st.lists(st.integers(0, len(tokens) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(tokens)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    one, other = ({token: id_ for id_, token in enumerate(some)} for some in (tokens, swapped))
    assert mismatch(one, other, len(one), len(other)).startswith(f"token {min(i, j)} ")
