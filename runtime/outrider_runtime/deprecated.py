"""Flags of other engines and older guides, translated to ours with a warning, because users paste them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from outrider_runtime.errors import Refusal


def _renamed(new: str) -> Callable[[str, str], list[str]]:
    return lambda old, value: [new, value]


def _draft(old: str, value: str) -> list[str]:
    if value in ("[ngram]", "ngram"):
        return ["--speculative-method", "ngram"]
    return ["--draft-model", value]


def _method(old: str, value: str) -> list[str]:
    methods = {
        "ngram": "ngram",
        "suffix": "suffix",
        "draft_model": "draft-model",
        "draft-model": "draft-model",
        "STANDALONE": "draft-model",
        "eagle3": "eagle3",
        "eagle": "eagle",
        "medusa": "medusa",
    }
    if value.lower() not in methods and value not in methods:
        raise Refusal(
            "InvalidArgument",
            f"{old} {value} is not supported; use --speculative-method {', '.join(dict.fromkeys(methods.values()))}",
        )
    return ["--speculative-method", methods.get(value) or methods[value.lower()]]


def _suffix_requests(old: str, value: str) -> list[str]:
    if value != "0":
        raise Refusal("InvalidArgument", f"{old} {value} is not supported; bound tokens with --suffix-cache-tokens")
    return ["--suffix-cache-tokens", "0"]


def _draft_parallelism(old: str, value: str) -> list[str]:
    if value != "1":
        raise Refusal("InvalidArgument", f"{old} {value} is not supported; the draft runs on one device, drop the flag")
    return []


def _config(old: str, value: str) -> list[str]:
    """vLLM's JSON object. A key that has no meaning here is refused, never ignored."""
    try:
        config = json.loads(value)
    except json.JSONDecodeError as error:
        raise Refusal("InvalidArgument", f"{old} {value!r} is not JSON ({error}); give our flags instead") from error
    if not isinstance(config, dict):
        raise Refusal("InvalidArgument", f"{old} {value!r} must be a JSON object; give our flags instead")
    flags: list[str] = []
    for key, setting in config.items():
        if key not in _CONFIG_KEYS:
            raise Refusal(
                "InvalidArgument", f"{old}: key {key!r} is not supported; the keys are {', '.join(_CONFIG_KEYS)}"
            )
        flags += _CONFIG_KEYS[key](f"{old} {key}", str(setting))
    return flags


_CONFIG_KEYS: dict[str, Callable[[str, str], list[str]]] = {
    "method": _method,
    "model": _draft,
    "revision": _renamed("--draft-revision"),
    "num_speculative_tokens": _renamed("--max-speculative-tokens"),
    "prompt_lookup_max": _renamed("--ngram-max"),
    "prompt_lookup_min": _renamed("--ngram-min"),
    "suffix_decoding_min_token_prob": _renamed("--suffix-min-probability"),
    "suffix_decoding_max_cached_requests": _suffix_requests,
    "draft_tensor_parallel_size": _draft_parallelism,
}

_FLAGS: dict[str, Callable[[str, str], list[str]]] = {
    "--speculative-model": _draft,
    "--spec-model": _draft,
    "--speculative-draft-model-path": _draft,
    "--spec-method": _method,
    "--speculative-algorithm": _method,
    "--num-speculative-tokens": _renamed("--max-speculative-tokens"),
    "--spec-tokens": _renamed("--max-speculative-tokens"),
    "--speculative-num-steps": _renamed("--max-speculative-tokens"),
    "--ngram-prompt-lookup-max": _renamed("--ngram-max"),
    "--ngram-prompt-lookup-min": _renamed("--ngram-min"),
    "--speculative-draft-tensor-parallel-size": _draft_parallelism,
    "--speculative-config": _config,
    "-sc": _config,
    "--max-num-seqs": _renamed("--max-concurrency"),
    "--max-num-batched-tokens": _renamed("--max-batched-tokens"),
}


def modernize(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with old flags replaced, and one warning for each. Raises Refusal(InvalidArgument)."""
    modern: list[str] = []
    warnings: list[str] = []
    rest = iter(argv)
    for argument in rest:
        flag, separator, value = argument.partition("=")
        if flag not in _FLAGS:
            modern.append(argument)
            continue
        if not separator:
            following = next(rest, None)
            if following is None:
                raise Refusal("InvalidArgument", f"{flag} needs a value")
            value = following
        replacement = _FLAGS[flag](flag, value)
        modern += replacement
        warnings.append(f"{flag} {value} is deprecated; use {' '.join(replacement) or 'nothing in its place'}")
    return modern, warnings
