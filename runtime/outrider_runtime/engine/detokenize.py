"""From token ids to text as they arrive: characters that span tokens, and stop strings cut out of the text.

Tokens become bytes and bytes become text, so the text is the same however the tokens are split into steps. What may
be the beginning of a stop string is held back until decided.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer, decoders

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes are themselves, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenBytes(dict[int, bytes]):
    """The bytes each token stands for; none for special tokens and for ids past the vocabulary (padding).

    A dictionary that fills itself, as every token of every stream is looked up in it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = byte_level_alphabet() if isinstance(tokenizer.decoder, decoders.ByteLevel) else None
        super().__init__(
            (id, b"" if token.special else token.content.encode())
            for id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special or self._alphabet is not None  # other decoders change text that was added, too
        )
        self._byte_fallback = self._alphabet is None and tokenizer.token_to_id("<0x00>") is not None

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._compute(token_id)
        return found

    def join(self, token_ids: Sequence[int]) -> bytes:
        return b"".join([self[token_id] for token_id in token_ids])

    def _compute(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._alphabet is not None:
            try:
                return bytes([self._alphabet[character] for character in piece])
            except KeyError:  # a name that was never added as a token
                return piece.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        # Other decoders treat the first token of a text in their own way; the second shows what it is in mid-text.
        once = self._tokenizer.decode([token_id], skip_special_tokens=False)
        twice = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        text: str = twice[len(once) :]
        return text.encode()


class Decoded(NamedTuple):
    """Text that is decided, how many of the step's tokens were kept, and whether a stop string ended the request."""

    text: str
    tokens: int
    stopped: bool = False


class Detokenizer:
    """Of one request. `hidden` tokens (EOS) have no text; stop strings count once `min_tokens` are generated."""

    def __init__(
        self,
        vocabulary: TokenBytes,
        *,
        stop: Sequence[str] = (),
        hidden: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._stop = tuple(stop)
        self._hidden = frozenset(hidden)
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole = True  # no character is begun in the decoder
        self._held = ""  # the longest tail of the text so far that a stop string begins with
        self._tokens = 0

    def add(self, token_ids: Sequence[int]) -> Decoded:
        if not self._stop:
            shown = token_ids
            if not self._hidden.isdisjoint(token_ids):
                shown = [token_id for token_id in token_ids if token_id not in self._hidden]
            return Decoded(self._decode(self._vocabulary.join(shown)), len(token_ids))
        parts: list[str] = []
        for kept, token_id in enumerate(token_ids, 1):
            self._tokens += 1
            piece = "" if token_id in self._hidden else self._decode(self._vocabulary[token_id])
            text = self._held + piece
            end = self._stop_begins(text, len(self._held)) if self._tokens >= self._min_tokens else None
            if end is not None:
                self._held = ""
                self._decoder.reset()
                return Decoded("".join(parts) + text[:end], kept, stopped=True)
            decided = len(text) - self._undecided(text)
            parts.append(text[:decided])
            self._held = text[decided:]
        return Decoded("".join(parts), len(token_ids))

    def finish(self) -> str:
        """What was held back; a character that never became whole shows as U+FFFD."""
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return text

    def _decode(self, data: bytes) -> str:
        if self._whole:  # nearly always, and then there is a faster way
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._whole = not self._decoder.getstate()[0]
        return text

    def _stop_begins(self, text: str, checked: int) -> int | None:
        """Where the stop string begins that is complete first, past the `checked` characters; the longest of equals."""
        found: list[tuple[int, int]] = []
        for stop in self._stop:
            begin = text.find(stop, max(0, checked - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin))
        return min(found)[1] if found else None

    def _undecided(self, text: str) -> int:
        """Length of the longest tail of `text` with which a stop string begins."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) and len(stop) > length for stop in self._stop):
                return length
        return 0
