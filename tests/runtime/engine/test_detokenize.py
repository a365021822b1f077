"""Text is the same however its tokens arrive, and ends where a stop string begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.folders import tokenizer as byte_level
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from outrider_runtime.engine.detokenize import Detokenizer, TokenBytes

BACKEND = byte_level().backend_tokenizer
VOCABULARY = TokenBytes(BACKEND)
EOS = 1
TEXTS = st.text(st.sampled_from("ab é€𝄞😀\n"), max_size=30)


def _sentencepiece_like() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    return backend


SENTENCEPIECE = _sentencepiece_like()
SENTENCEPIECE_VOCABULARY = TokenBytes(SENTENCEPIECE)


def _steps(draw, ids):
    """The ids cut into steps at random."""
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def _feed(detokenizer, steps):
    """(text, tokens kept, whether a stop string ended it)"""
    text, tokens = "", 0
    for step in steps:
        decoded = detokenizer.add(step)
        text += decoded.text
        tokens += decoded.tokens
        if decoded.stopped:
            return text, tokens, True
    return text + detokenizer.finish(), tokens, False


@given(st.data(), TEXTS)
def test_any_split_of_byte_level_tokens_gives_the_text(data, text):
    ids = BACKEND.encode(text).ids
    assert _feed(Detokenizer(VOCABULARY), _steps(data.draw, ids))[0] == text


@given(st.data(), TEXTS)
def test_any_split_of_byte_fallback_tokens_gives_the_text(data, text):
    ids = SENTENCEPIECE.encode(text).ids
    got = _feed(Detokenizer(SENTENCEPIECE_VOCABULARY), _steps(data.draw, ids))[0]
    assert got.removeprefix(" ") == SENTENCEPIECE.decode(ids)  # in mid-text the first space belongs to the answer


@given(st.data(), st.lists(st.integers(0, 300), max_size=30))
def test_any_split_of_any_tokens_gives_one_text(data, ids):
    whole = _feed(Detokenizer(VOCABULARY), [ids])
    assert _feed(Detokenizer(VOCABULARY), _steps(data.draw, ids)) == whole
    assert whole[0] == BACKEND.decode([id for id in ids if id < 288])


def _cut(text: str, stops: list[str]) -> str:
    """The same, said one character at a time: the stop string that is complete first, and the longest of those."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


@given(st.data(), st.text("aab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_text_ends_where_the_first_stop_string_begins_however_it_is_split(data, text, stops):
    ids = list(BACKEND.encode(text).ids)
    got, kept, stopped = _feed(Detokenizer(VOCABULARY, stop=stops), _steps(data.draw, ids))
    assert got == _cut(text, stops)
    assert stopped == (got != text or any(stop in text for stop in stops))
    decoded_so_far = VOCABULARY.join(ids[:kept]).decode()
    assert not stopped or any(stop in decoded_so_far for stop in stops)
    assert not stopped or not any(stop in VOCABULARY.join(ids[: kept - 1]).decode() for stop in stops)


@given(st.data(), TEXTS, st.lists(st.sampled_from(["é", "b€", "a b", "\n\n"]), min_size=1, max_size=3))
def test_stop_strings_of_many_bytes_are_found_across_tokens(data, text, stops):
    got, _, _ = _feed(Detokenizer(VOCABULARY, stop=stops), _steps(data.draw, list(BACKEND.encode(text).ids)))
    assert got == _cut(text, stops)


def _ids(text):
    return [BACKEND.token_to_id(character) for character in text]


def test_a_possible_beginning_is_held_back_until_decided():
    detokenizer = Detokenizer(VOCABULARY, stop=["END"])
    assert detokenizer.add(_ids("xE")).text == "x"
    assert detokenizer.add(_ids("N")).text == ""
    assert detokenizer.add(_ids("x")).text == "ENx"
    assert detokenizer.add(_ids("EN")).text == ""
    assert detokenizer.finish() == "EN"


def test_tokens_past_a_stop_string_inside_a_step_are_not_counted():
    decoded = Detokenizer(VOCABULARY, stop=["b"]).add(_ids("aabaa"))
    assert (decoded.text, decoded.tokens, decoded.stopped) == ("aa", 3, True)


def test_a_stop_string_does_not_count_before_min_tokens():
    detokenizer = Detokenizer(VOCABULARY, stop=["b"], min_tokens=4)
    decoded = detokenizer.add(_ids("abababa"))
    assert (decoded.text, decoded.tokens, decoded.stopped) == ("aba", 4, True)


@pytest.mark.parametrize("ids", [[EOS], [0], [5000]])
def test_special_tokens_and_ids_past_the_vocabulary_have_no_text(ids):
    assert _feed(Detokenizer(VOCABULARY), [[*_ids("a"), *ids, *_ids("b")]])[0] == "ab"


def test_added_tokens_that_are_text_are_spelt_by_the_decoder_as_all_others():
    """Gemma's runs of spaces are such: added, not special, and spelt with the sign that the decoder turns to spaces."""
    backend = _sentencepiece_like()
    backend.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("<b>", normalized=False)])
    ids = [backend.token_to_id(piece) for piece in ("a", "▁▁", "b", "<b>", "▁▁")]
    assert _feed(Detokenizer(TokenBytes(backend)), [ids])[0] == "a  b<b>  " == backend.decode(ids)


def test_a_byte_level_piece_of_other_characters_stands_for_itself():
    """As in the decoder of tokenizers: some vocabularies hold names that were never added as tokens."""
    backend = Tokenizer(models.BPE({"a": 0, "[PAD 1]": 1, "▁ü": 2, "Ã¼": 3}, []))
    backend.decoder = decoders.ByteLevel()
    ids = [0, 1, 2, 3, 0]
    assert _feed(Detokenizer(TokenBytes(backend)), [ids])[0] == "a[PAD 1]▁üüa" == backend.decode(ids)


def test_an_end_token_that_is_not_special_is_hidden_all_the_same():
    (a, b) = _ids("ab")
    assert _feed(Detokenizer(VOCABULARY, hidden=[b]), [[a], [b]])[0] == "a"


def test_half_a_character_at_the_end_shows_as_a_replacement():
    (first, *_) = BACKEND.encode("😀").ids
    detokenizer = Detokenizer(VOCABULARY)
    assert detokenizer.add([first]).text == ""
    assert detokenizer.finish() == "\ufffd"
