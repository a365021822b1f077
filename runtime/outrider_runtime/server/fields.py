"""Fields of a body that are more than one type: checked and turned to plain values; and those that are not supported.

The functions raise ValueError with words that follow the field's name.
"""

from __future__ import annotations

from typing import Any

from outrider_runtime.sampling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from outrider_runtime.speculation.policy import MAX_SPECULATIVE_TOKENS

MAX_CHOICES = 128  # OpenAI's
MAX_BAD_WORD_CHARACTERS = 256
_BIAS = 100.0  # OpenAI's: as good as a ban, or as nothing else

# Fields of OpenAI's API, and of engines like it, that are not supported -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
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
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
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


def prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and _are_ids(value):
        return tuple(value)
    if isinstance(value, list) and len(value) > 1 and all(isinstance(item, str | list) for item in value):
        raise ValueError("must be one prompt; send one request for each")
    raise ValueError("must be a string or a list of token ids, not empty")


def content(value: object) -> str:
    """Of a chat message."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"has a part of type {kind}; only text parts are supported")
    return "".join(part["text"] for part in value)


def stop(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) and item for item in strings):
        raise ValueError("must be a string or a list of strings, none empty")
    if len(strings) > 4:
        raise ValueError("must hold at most 4 strings")
    return tuple(strings)


def stop_token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not _are_ids(value):
        raise ValueError("must be a list of token ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"must hold at most {MAX_STOP_TOKEN_IDS} token ids")
    return tuple(value)


def speculative(value: object) -> int | None:
    if value is False:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SPECULATIVE_TOKENS:
        raise ValueError(f"must be false or an integer from 0 to {MAX_SPECULATIVE_TOKENS}")
    return value


def logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and what is added to its logit."""
    if not isinstance(value, dict):
        raise ValueError("must be an object from token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} token ids")
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"has the key {key[:40]!r}, which is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -_BIAS <= bias <= _BIAS:
            raise ValueError(f"of token {key} must be a number from {-_BIAS:g} to {_BIAS:g}")
        pairs[int(key)] = float(bias)
    return tuple(pairs.items())


def bad_words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
        raise ValueError("must be a list of strings, none blank")
    if any(len(item) > MAX_BAD_WORD_CHARACTERS for item in value):
        raise ValueError(f"must hold strings of at most {MAX_BAD_WORD_CHARACTERS} characters")
    return tuple(value)


def logprobs(value: object) -> int | None:
    """Of a completion: how many of the likeliest tokens beside the chosen one."""
    if value is False:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LOGPROBS:
        raise ValueError(f"must be an integer from 0 to {MAX_LOGPROBS}")
    return value


def _are_ids(values: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item < 1 << 31 for item in values)
