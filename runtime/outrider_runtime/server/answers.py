"""The OpenAI API's bodies out: whole answers, the chunks of a stream, usage and errors."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider_runtime.errors import BadRequest, RuntimeFault, Unavailable

Kind = Literal["chat", "completion"]


@dataclass(slots=True)
class Usage:
    """Tokens of one request that were kept. A target forward is a step that gave it tokens."""

    prompt_tokens: int
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

    def answer(self, text: str, finish_reason: str, usage: Usage) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {
            **self.head("chat.completion" if self.kind == "chat" else "text_completion"),
            "choices": [choice],
            "usage": usage.to_json(),
        }

    def head(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


class Chunks:
    """Server-sent events of one stream, as bytes around a prefix that is encoded once."""

    def __init__(self, envelope: Envelope, *, include_usage: bool) -> None:
        chat = envelope.kind == "chat"
        head = _compact(envelope.head("chat.completion.chunk" if chat else "text_completion"))
        self._head = b"data: " + head[:-1] + b","
        self._usage = b',"usage":null' if include_usage else b""
        self._before_text = self._head + b'"choices":[{"index":0,"logprobs":null,'
        self._before_text += b'"delta":{"content":' if chat else b'"text":'
        self._after_text = (b"}" if chat else b"") + b',"finish_reason":'
        self._empty = b'"choices":[{"index":0,"logprobs":null,"delta":{%s},"finish_reason":%s}]'
        self._chat = chat

    def opening(self) -> bytes:
        """A chat stream begins with the role."""
        if not self._chat:
            return b""
        return self._head + self._empty % (b'"role":"assistant","content":""', b"null") + self._end()

    def text(self, text: str, finish_reason: str | None) -> bytes:
        reason = b"null" if finish_reason is None else b'"%s"' % finish_reason.encode()
        if self._chat and not text:
            return self._head + self._empty % (b"", reason) + self._end()
        return self._before_text + _compact(text) + self._after_text + reason + b"}]" + self._end()

    def closing(self, usage: Usage) -> bytes:
        last = b"data: [DONE]\n\n"
        if not self._usage:
            return last
        return self._head + b'"choices":[],"usage":' + _compact(usage.to_json()) + b"}\n\n" + last

    def _end(self) -> bytes:
        return self._usage + b"}\n\n"


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def error_body(fault: RuntimeFault) -> dict[str, Any]:
    """OpenAI's error object; a fault that is not the client's says no more than its own message."""
    match fault:
        case BadRequest(message=message, param=param, code=code, status=status):
            kind = "authentication_error" if status == 401 else "invalid_request_error"
            return _error(message, kind, param, code)
        case Unavailable(message=message, code=code, status=status):
            return _error(message, "rate_limit_error" if status == 429 else "server_error", None, code)
        case _:
            return _error(str(fault), "server_error", None, "engine_error")


def error_event(fault: RuntimeFault) -> bytes:
    return b"data: " + _compact(error_body(fault)) + b"\n\n"


def error_status(fault: RuntimeFault) -> int:
    return fault.status if isinstance(fault, BadRequest | Unavailable) else 500


def _error(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
