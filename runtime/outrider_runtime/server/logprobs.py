"""Log-probabilities of a choice's tokens, in OpenAI's two forms: a chat has a list of objects, a completion columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider_runtime.engine.messages import TokenLogprobs
from outrider_runtime.server.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity; OpenAI says this of a token that cannot be
Entries = Sequence[tuple[int, TokenLogprobs]]  # token id, and what the engine tells of it


class ChatLogprobs:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def body(self, entries: Entries) -> dict[str, Any]:
        content = [
            {**self._token(id, told.logprob), "top_logprobs": [self._token(*pair) for pair in told.top]}
            for id, told in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.spelling(token_id),
            "logprob": max(logprob, _LEAST),
            "bytes": list(self._tokenizer.token_bytes[token_id]),
        }


class CompletionLogprobs:
    """`text_offset` counts the characters of the tokens before, as they are spelt here. `top_logprobs` has the drawn
    token, too, if it is not among the likeliest, as OpenAI's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def body(self, entries: Entries) -> dict[str, Any]:
        spelling = self._tokenizer.spelling
        tokens = [spelling(id) for id, _ in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(told.logprob, _LEAST) for _, told in entries],
            "top_logprobs": [
                {spelling(id): max(logprob, _LEAST) for id, logprob in (*told.top, (drawn, told.logprob))}
                for drawn, told in entries
            ],
            "text_offset": offsets,
        }


Logprobs = ChatLogprobs | CompletionLogprobs
