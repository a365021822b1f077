"""The OpenAI API's wire types: bodies in, checked field by field; bodies out.

A field that is not supported is refused by name unless its value is the one that changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from outrider_runtime.errors import BadRequest
from outrider_runtime.sampling.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGPROBS, SamplingParams
from outrider_runtime.server import fields

COMPLETION_DEFAULT_TOKENS = 16  # OpenAI's, of /v1/completions; a chat answer may fill the context

_Request = TypeVar("_Request", bound="GenerationRequest")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, value: object) -> object:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(fields.content)]
    name: str | None = Field(None, max_length=256)

    @model_validator(mode="before")
    @classmethod
    def _no_neutral_fields(cls, value: object) -> object:
        """Answers sent back carry fields that are null; OpenAI's `developer` is a template's `system`."""
        if not isinstance(value, dict):
            return value
        kept = {k: v for k, v in value.items() if k in cls.model_fields or v not in (None, [])}
        return {**kept, "role": "system"} if kept.get("role") == "developer" else kept

    def for_template(self) -> dict[str, str]:
        message = {"role": self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class GenerationRequest(_Body):
    """What both endpoints take. JSON's null is the default everywhere."""

    model: str
    n: int = Field(1, ge=1, le=fields.MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[str, ...], BeforeValidator(fields.stop)] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(fields.stop_token_ids)] = ()
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(fields.logit_bias)] = ()
    bad_words: Annotated[tuple[str, ...], BeforeValidator(fields.bad_words)] = ()
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    speculative: Annotated[int | None, BeforeValidator(fields.speculative)] = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams; set stream to true or drop it")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def limit(self) -> int | None:
        """Tokens to generate at most, as asked; None for what fits the context."""
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told with each token; None for none, nor itself."""
        raise NotImplementedError

    def sampling_params(
        self, prompt_tokens: int, *, max_model_len: int, vocab_size: int, encode: Callable[[str], tuple[int, ...]]
    ) -> tuple[SamplingParams, ...]:
        """One for each of the `n` choices. Raises BadRequest, context_length_exceeded for instance."""
        bad_words = _token_sequences(self.bad_words, encode)
        self._check_ids(vocab_size, bad_words)
        max_tokens = self._max_tokens(prompt_tokens, max_model_len)
        first = SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            bad_words=bad_words,
            logprobs=self.num_logprobs(),
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            speculative=self.speculative,
        )
        return first, *(replace(first, seed=_choice_seed(self.seed, index)) for index in range(1, self.n))

    def _max_tokens(self, prompt_tokens: int, max_model_len: int) -> int:
        limit = self.limit()
        room = max_model_len - prompt_tokens
        if room < (limit or 1):
            asked = f" and {limit} for the answer" if limit else ", which leaves none for the answer"
            raise BadRequest(
                f"the context of this model holds {max_model_len} tokens; this request has {prompt_tokens} in the "
                f"prompt{asked}; shorten the prompt{' or lower max_tokens' if limit else ''}",
                "messages" if isinstance(self, ChatRequest) else "prompt",
                "context_length_exceeded",
            )
        max_tokens = limit or room
        if self.min_tokens > max_tokens:
            raise BadRequest(f"min_tokens {self.min_tokens} is above the {max_tokens} of max_tokens", "min_tokens")
        return max_tokens

    def _check_ids(self, vocab_size: int, bad_words: tuple[tuple[int, ...], ...]) -> None:
        for name, ids in (
            ("logit_bias", [id for id, _ in self.logit_bias]),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words", [id for word in bad_words for id in word]),
        ):
            if ids and max(ids) >= vocab_size:
                raise BadRequest(
                    f"{name} has token id {max(ids)}; this model's go to {vocab_size - 1}", name, "invalid_value"
                )


def _token_sequences(words: tuple[str, ...], encode: Callable[[str], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Each word as it begins a text, and as it stands behind a space where that is another token."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
        if not bare:
            raise BadRequest(
                f"bad_words has {_shown(word)}, which is no tokens of this model; drop it", "bad_words", "invalid_value"
            )
        found[bare] = None
        if len(spaced) == len(bare):
            found[spaced] = None
        if len(bare) > MAX_BAD_WORD_TOKENS:
            raise BadRequest(
                f"bad_words has {_shown(word)} of {len(bare)} tokens; at most {MAX_BAD_WORD_TOKENS} are allowed",
                "bad_words",
                "invalid_value",
            )
    if len(found) > MAX_BAD_WORDS:
        raise BadRequest(
            f"bad_words makes {len(found)} sequences of tokens, with and without a space before each word; "
            f"at most {MAX_BAD_WORDS} are allowed",
            "bad_words",
            "invalid_value",
        )
    return tuple(found)


def _choice_seed(seed: int | None, index: int) -> int | None:
    """Of a further choice, so that it differs from the first and comes again with the request's seed."""
    if seed is None:
        return None
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "big", signed=True)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[str | tuple[int, ...], BeforeValidator(fields.prompt)]

    logprobs: Annotated[int | None, BeforeValidator(fields.logprobs)] = None

    def limit(self) -> int:
        return COMPLETION_DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs; set logprobs to true or drop it")
        return self

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises BadRequest."""
    return _parse(CompletionRequest, body)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises BadRequest."""
    return _parse(ChatRequest, body)


def _parse(kind: type[_Request], body: bytes) -> _Request:
    refused = fields.UNSUPPORTED
    known: dict[str, object] = {}
    for name, value in _object(body).items():
        if value is None:
            continue
        if name in kind.model_fields and name not in refused:
            known[name] = value
        elif not any(type(value) is type(neutral) and value == neutral for neutral in refused.get(name, ())):
            raise _unsupported(name, value, known=name in refused)
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _bad_field(error) from error


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object; got {_shown(value)}", code="invalid_json")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _unsupported(name: str, value: object, *, known: bool) -> BadRequest:
    if known:
        return BadRequest(
            f"{name} is not supported by this server; got {_shown(value)}, drop it", name, "unsupported_parameter"
        )
    return BadRequest(f"{name} is not a field of this request; drop it", name, "unknown_parameter")


def _bad_field(error: ValidationError) -> BadRequest:
    first = error.errors(include_url=False)[0]
    field = ""
    for part in first["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
    if not field:  # a rule over several fields names them itself
        return BadRequest(message, message.split()[0], "invalid_value")
    if first["type"] == "missing":
        return BadRequest(f"{field} is missing; give it", field, "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return BadRequest(
            f"{field} is not supported; got {_shown(first['input'])}, drop it", field, "unknown_parameter"
        )
    return BadRequest(
        f"{field} {message[0].lower()}{message[1:]}; got {_shown(first['input'])}", field, "invalid_value"
    )


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
