"""Chat messages become the template's tokens, and what a client writes is always text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.folders import CHAT_TEMPLATE
from tests.runtime.folders import tokenizer as reference
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from outrider_runtime.errors import BadRequest, Refusal
from outrider_runtime.server.chat import ChatTemplate, load_chat_template
from outrider_runtime.server.tokenizer import Tokenizer

START, END = 0, 1  # <|im_start|>, <|im_end|>


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_dir):
    return Tokenizer(tiny_tokenizer_dir)


@pytest.fixture(scope="module")
def template(tiny_tokenizer_dir, tokenizer):
    return load_chat_template(tiny_tokenizer_dir, tokenizer)


def test_the_prompt_is_what_transformers_makes_of_it(template):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "the road é😀\n "},
        {"role": "assistant", "content": "ahead"},
        {"role": "user", "content": ""},
    ]
    expected = reference().apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(template.encode(messages)) == list(expected)


@given(
    parts=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "system\n", "the road", " ", "<|", "é"]), max_size=8)
)
def test_control_tokens_in_a_users_message_are_text(tokenizer, template, parts):
    content = "".join(parts)
    ids = template.encode([{"role": "user", "content": content}])
    assert [id for id in ids if id in (START, END)] == [START, END, START]
    end = ids.index(END)
    assert tokenizer.token_bytes.join(ids[1:end]).decode() == f"user\n{content}"


def test_protected_text_is_tokenized_without_seams(tokenizer, template):
    """Words around a written-out control token are those that the same text without its meaning would have."""
    plain = Backend.from_str(json.dumps({**json.loads(tokenizer._path.read_bytes()), "added_tokens": []}))
    content = "the road<|im_end|>the road"
    ids = template.encode([{"role": "user", "content": content}])
    assert list(ids[1 : ids.index(END)]) == plain.encode(f"user\n{content}").ids


def test_a_role_or_name_cannot_smuggle_control_tokens_either(tokenizer):
    template = ChatTemplate("{{ messages[0]['name'] }}", {}, tokenizer)
    ids = template.encode([{"role": "user", "content": "", "name": "<|im_end|>"}])
    assert END not in ids


def test_markup_that_the_model_wrote_itself_is_still_seen_by_the_template(tmp_path, tiny_tokenizer_dir):
    backend = Backend.from_file(str(tiny_tokenizer_dir / "tokenizer.json"))
    backend.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}", {}, tokenizer
    )
    thought = tokenizer.encode("</think>", add_special_tokens=False)
    assert len(thought) == 1
    answer = template.encode([{"role": "assistant", "content": "hm</think>yes"}])
    assert tokenizer.token_bytes.join(answer) == b"yes"
    asked = template.encode([{"role": "user", "content": "hm</think>yes"}])
    assert thought[0] not in asked
    assert tokenizer.token_bytes.join(asked) == b"hm</think>yes"


def _metaspace_folder(folder, scheme):
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "<", "s", ">", "/", "▁a", "</", "</s", "\n", "\n\n"]
    merges = [("▁", "a"), ("<", "/"), ("</", "s"), ("</s", ">"), ("\n", "\n")]
    backend = Backend(models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("\n\n", special=False, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_space_is_put_before_a_text_where_the_tokenizer_itself_puts_it(tmp_path, scheme):
    tokenizer = _metaspace_folder(tmp_path, scheme)
    assert tokenizer.encode_protected("a</s>aM", {"M": "b"}) == tokenizer.encode("a</s>ab", add_special_tokens=False)


def test_control_tokens_that_are_ordinary_pieces_too_do_not_come_of_text(tmp_path):
    tokenizer = _metaspace_folder(tmp_path, "never")
    ids = tokenizer.encode_protected("<s>M", {"M": "</s>"})
    assert ids[0] == 1
    assert 2 not in ids


def test_blanks_that_are_added_tokens_are_text_to_the_template_and_to_the_tokenizer(tmp_path):
    """As Gemma's and GPT-NeoX's are."""
    tokenizer = _metaspace_folder(tmp_path, "never")
    template = ChatTemplate("<s>{{ messages[0].content | trim }}", {}, tokenizer)
    ids = template.encode([{"role": "user", "content": "\n\na a\n\nb a\n\n"}])
    assert ids == tokenizer.encode("<s>a a\n\nb a", add_special_tokens=False)


def test_a_control_token_in_a_text_leaves_the_words_around_it_whole(tmp_path):
    tokenizer = _metaspace_folder(tmp_path, "never")
    template = ChatTemplate("<s>{{ messages[0].content }}", {}, tokenizer)
    before, behind = (tokenizer.encode(text, add_special_tokens=False) for text in ("<s>a a\n\né a", " a\n\nb"))
    written = [tokenizer._backend.token_to_id(character) for character in "</s>"]
    assert template.encode([{"role": "user", "content": "a a\n\né a</s> a\n\nb"}]) == (*before, *written, *behind)


def test_an_added_token_that_is_text_is_spelt_as_that_text(tmp_path):
    backend = _metaspace_folder(tmp_path, "never")._backend
    backend.add_tokens([AddedToken("▁▁", special=False, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.spelling(backend.token_to_id(token)) for token in ("▁▁", "</s>")] == ["  ", "</s>"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_refuses_or_breaks_out_is_the_clients_400(tokenizer, source):
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source, {}, tokenizer).encode([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_templates_may_use_what_transformers_gives_them(tokenizer):
    source = (
        "{% generation %}{{ messages | tojson }}{% endgeneration %}{{ bos_token }}"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    ids = ChatTemplate(source, {"bos_token": "<|im_start|>"}, tokenizer).encode([{"role": "user", "content": "<é>"}])
    assert START in ids
    assert tokenizer.token_bytes.join(ids).decode() == '[{"role": "user", "content": "<é>"}]4'


def test_a_broken_template_is_refused_at_start(tokenizer):
    with pytest.raises(Refusal, match="chat template"):
        ChatTemplate("{% if %}", {}, tokenizer)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": CHAT_TEMPLATE, "eos_token": {"content": "<|im_end|>"}},
        {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHAT_TEMPLATE}]},
    ],
)
def test_a_template_in_the_tokenizers_config_is_found(tmp_path, tokenizer, template, config):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "the road"}]
    assert load_chat_template(tmp_path, tokenizer).encode(messages) == template.encode(messages)


@pytest.mark.parametrize("config", [{}, {"bos_token": None, "eos_token": ""}])
def test_tokens_that_only_the_special_tokens_map_names_are_given_to_the_template(tmp_path, tokenizer, config):
    source = "{{ bos_token }}hi{{ eos_token }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **config}))
    names = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    start, *_, end = load_chat_template(tmp_path, tokenizer).encode([{"role": "user", "content": ""}])
    assert (start, end) == (START, END)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff"),
        ("special_tokens_map.json", b"{"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_torn_file_beside_the_template_is_refused_by_its_name(tmp_path, tokenizer, name, content):
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refusal) as caught:
        load_chat_template(tmp_path, tokenizer)
    assert caught.value.reason == "UnsupportedModel"
    assert caught.value.message.startswith(f"{tmp_path / name} cannot be read (")


def test_a_model_may_have_no_template(tmp_path, tokenizer):
    assert load_chat_template(tmp_path, tokenizer) is None


@pytest.mark.parametrize("text", [None, "", "{}", "[]", "torn"])
def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(Refusal, match="tokenizer"):
        Tokenizer(tmp_path)
