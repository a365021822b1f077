"""Text to token ids for the HTTP process, where a special token's name in a client's text can stay plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from outrider_runtime.engine.detokenize import TokenBytes
from outrider_runtime.errors import Refusal


class Tokenizer:
    """Of one model, from its folder's tokenizer.json. Thread-safe: encoding changes nothing."""

    def __init__(self, folder: Path) -> None:
        """Raises Refusal(UnsupportedModel)."""
        self._path = path = folder / "tokenizer.json"
        try:
            self._backend = _backend(json.loads(path.read_bytes()))
        except Exception as error:  # tokenizers raises bare Exception
            raise Refusal(
                "UnsupportedModel", f"{path} is no tokenizer ({error}); give the model's folder one"
            ) from error
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        self._ids = {token.content: id for id, token in added.items()}
        self._names = {id: token.content for id, token in added.items() if token.special}
        self._added = any_of(self._ids)
        self.token_bytes = TokenBytes(self._backend)
        # Markup like </think> is not special and yet no text; runs of blanks, which many vocabularies add, are.
        self.control_tokens = frozenset(
            token.content for id, token in added.items() if token.special or not self.token_bytes[id].isspace()
        )

    def spelling(self, token_id: int) -> str:
        """A token for people to read: its name if it is special; `bytes:` and those in hexadecimal if it is no text."""
        data = self.token_bytes[token_id]
        try:
            return self._names.get(token_id) or data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Special tokens written in `text` are control tokens, as in a raw prompt."""
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_protected(self, text: str, protected: dict[str, str]) -> tuple[int, ...]:
        """Like encode(), but each key of `protected` in `text` stands for its value as plain text.

        Between two added tokens the text is tokenized whole, so protection leaves no seams in it.
        """
        if not protected:
            return self.encode(text, add_special_tokens=False)
        ids: list[int] = []
        marks = any_of(protected)
        position = 0
        for match in [*self._added.finditer(text), None]:
            piece = text[position : match.start() if match else len(text)]
            if piece:
                ids += self._encode_plain(marks.sub(lambda mark: protected[mark[0]], piece), first=position == 0)
            if match:
                ids.append(self._ids[match[0]])
                position = match.end()
        return tuple(ids)

    @cached_property
    def _plain(self) -> tuple[Backend, Backend]:
        """Without control tokens: for a text's first piece, and for the others. Made when needed, as it is rare."""
        definition = {**json.loads(self._path.read_bytes()), "added_tokens": []}
        return _backend(definition), _backend(_without_prefix(definition))

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        backend = self._plain[0 if first else 1]
        encoded = backend.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for id, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if self._backend.id_to_token(id) not in self.control_tokens:
                ids.append(id)
                continue
            # A vocabulary that holds control tokens as ordinary pieces too: one character at a time none is ever whole.
            for character in text[begin:end]:
                ids += backend.encode(character, add_special_tokens=False).ids
        return ids


def _backend(definition: dict[str, Any]) -> Backend:
    backend = Backend.from_str(json.dumps(definition))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _without_prefix(part: Any) -> Any:
    """The definition with every `prepend_scheme: first` off: for text that does not begin the prompt."""
    if isinstance(part, dict):
        return {k: "never" if (k, v) == ("prepend_scheme", "first") else _without_prefix(v) for k, v in part.items()}
    return [_without_prefix(item) for item in part] if isinstance(part, list) else part


def any_of(words: Collection[str]) -> re.Pattern[str]:
    """Matches any of the words, the longest first; nothing when there are none."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or r"(?!)")
