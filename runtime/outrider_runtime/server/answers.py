"""The OpenAI API's bodies out: whole answers, the chunks of a stream, usage and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from outrider_runtime.errors import BadRequest, EngineDead, RuntimeFault, Unavailable
from outrider_runtime.server.logprobs import Entries, Logprobs

Kind = Literal["chat", "completion"]


@dataclass(slots=True)
class Usage:
    """Tokens of one request that were kept. A target forward is a step that gave it tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    target_forwards: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
                "target_forwards": self.target_forwards,
            },
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body and chunk of one answer shares."""

    kind: Kind
    request_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{self.request_id}"

    def answer(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        return {
            **self.head("chat.completion" if self.kind == "chat" else "text_completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage.to_json(),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shown: dict[str, Any] = {"index": index, "logprobs": choice.logprobs, "finish_reason": choice.finish_reason}
        if self.kind == "chat":
            return {**shown, "message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return {**shown, "text": choice.text}

    def head(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


class Choice(NamedTuple):
    """One whole answer."""

    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None


class Chunks:
    """Server-sent events of one choice's stream, as bytes around a prefix that is encoded once."""

    def __init__(
        self, envelope: Envelope, index: int = 0, *, include_usage: bool, logprobs: Logprobs | None = None
    ) -> None:
        chat = envelope.kind == "chat"
        head = _encode(envelope.head("chat.completion.chunk" if chat else "text_completion"))
        self._chat = chat
        self._logprobs = logprobs
        self._head = b"data: " + head[:-1] + b","
        self._usage = b',"usage":null' if include_usage else b""
        self._end = self._usage + b"}\n\n"
        self._choice = self._head + b'"choices":[{"index":%d,' % index
        self._before_text = self._choice + b'"logprobs":null,' + (b'"delta":{"content":' if chat else b'"text":')
        self._after_text = (b"}" if chat else b"") + b',"finish_reason":null}]' + self._end

    def opening(self) -> bytes:
        """A chat stream begins with the role."""
        return self._other(b'"role":"assistant","content":""', b"null") if self._chat else b""

    def event(self, text: str, finish_reason: str | None, logprobs: Entries = ()) -> bytes:
        """Perhaps nothing, perhaps two: the text, and how it ends."""
        event = b""
        if self._logprobs is not None and logprobs:
            fields = (b'"content":' if self._chat else b'"text":') + _encode(text)
            event = self._other(fields, b"null", _encode(self._logprobs.body(logprobs)))
        elif text:
            event = self._before_text + _encode(text) + self._after_text
        if finish_reason is not None:
            event += self._other(b"" if self._chat else b'"text":""', b'"%b"' % finish_reason.encode())
        return event

    def closing(self, usage: Usage) -> bytes:
        """Once for all choices."""
        last = b"data: [DONE]\n\n"
        if not self._usage:
            return last
        return self._head + b'"choices":[],"usage":' + _encode(usage.to_json()) + b"}\n\n" + last

    def _other(self, fields: bytes, reason: bytes, logprobs: bytes = b"null") -> bytes:
        shown = b'"delta":{%b}' % fields if self._chat else fields
        return self._choice + b'"logprobs":%b,%b,"finish_reason":%b}]' % (logprobs, shown, reason) + self._end


_to_json: Callable[[object], str] = json.JSONEncoder(separators=(",", ":")).encode


def _encode(value: object) -> bytes:
    return _to_json(value).encode()


def error_body(fault: RuntimeFault) -> dict[str, Any]:
    """OpenAI's error object; a fault that is not the client's says no more than its own message."""
    match fault:
        case BadRequest(message=message, param=param, code=code, status=status):
            kind = "authentication_error" if status == 401 else "invalid_request_error"
            return _error(message, kind, param, code)
        case Unavailable(message=message, code=code, status=status):
            return _error(message, "rate_limit_error" if status == 429 else "server_error", None, code)
        case EngineDead(message=message):
            return _error(message, "server_error", None, "engine_dead")
        case _:
            return _error(str(fault), "server_error", None, "engine_error")


def error_event(fault: RuntimeFault) -> bytes:
    return b"data: " + _encode(error_body(fault)) + b"\n\n"


def error_status(fault: RuntimeFault) -> int:
    match fault:
        case BadRequest(status=status) | Unavailable(status=status):
            return status
        case EngineDead():  # another replica, or this one restarted, will answer
            return 503
        case _:
            return 500


def _error(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
