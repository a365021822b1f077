"""The OpenAI API's wire types: bodies in, checked field by field; bodies out.

A field that is not supported is refused by name unless its value is the one that changes nothing.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from outrider_runtime.errors import BadRequest
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.speculation.policy import MAX_SPECULATIVE_TOKENS

COMPLETION_DEFAULT_TOKENS = 16  # OpenAI's, of /v1/completions; a chat answer may fill the context

# Fields of OpenAI's API, and of engines like it, that are not supported here -> values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "min_p": (0, 0.0),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}


def _stop(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) and item for item in strings):
        raise ValueError("must be a string or a list of strings, none empty")
    if len(strings) > 4:
        raise ValueError("must hold at most 4 strings")
    return tuple(strings)


def _speculative(value: object) -> int | None:
    if value is False:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SPECULATIVE_TOKENS:
        raise ValueError(f"must be false or an integer from 0 to {MAX_SPECULATIVE_TOKENS}")
    return value


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    if isinstance(value, list) and len(value) > 1 and all(isinstance(item, str | list) for item in value):
        raise ValueError("must be one prompt; send one request for each")
    raise ValueError("must be a string or a list of token ids, not empty")


def _content(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"has a part of type {kind}; only text parts are supported")
    return "".join(part["text"] for part in value)


_Request = TypeVar("_Request", bound="GenerationRequest")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
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
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop)] = ()
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    speculative: Annotated[int | None, BeforeValidator(_speculative)] = None

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

    def sampling_params(self, prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """Raises BadRequest(context_length_exceeded)."""
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
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=self.stop,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            speculative=self.speculative,
        )


class CompletionRequest(GenerationRequest):
    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]

    def limit(self) -> int:
        return COMPLETION_DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises BadRequest."""
    return _parse(CompletionRequest, body)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises BadRequest."""
    return _parse(ChatRequest, body)


def _parse(kind: type[_Request], body: bytes) -> _Request:
    fields = _object(body)
    known: dict[str, object] = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name in kind.model_fields:
            known[name] = value
        elif not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ())):
            raise _unsupported(name, value)
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


def _unsupported(name: str, value: object) -> BadRequest:
    if name in _NEUTRAL:
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
