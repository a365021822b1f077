"""The engine without a server: prompts in, texts out, in this process. The same engine, steps and texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from outrider_runtime import flags
from outrider_runtime.config import EngineConfig
from outrider_runtime.engine import engine
from outrider_runtime.engine.detokenize import Detokenizer
from outrider_runtime.engine.messages import AddRequest, TokenDelta, TokenLogprobs
from outrider_runtime.errors import BadRequest, Refusal
from outrider_runtime.models.loader import load as load_models
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.server.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text, or token ids


@dataclass(slots=True)
class Completion:
    """`text` ends before a stop string, `token_ids` behind the token that completed it. `finish_reason` is stop, at
    a stop string, a stop id or the model's end of text, or length. `logprobs` has one entry per token if asked for."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None


class Engine(engine.Engine):
    """Made by load(). `tokenizer` is the model's."""

    tokenizer: Tokenizer

    @classmethod
    def load(cls, model: str | Path, *, report: Callable[[str], None] = lambda line: None, **options: object) -> Self:
        """`model` as `outrider serve --model` takes it: a folder, a GGUF file, hf://ORG/NAME. `options` are that
        command's flags about models, cache and speculation, with underscores: device="cuda", draft_model=...,
        max_model_len=8192, no_prefix_caching=True. `report` gets a line now and then. Raises Refusal.
        """
        config = _config(model, options)
        loaded = load_models(config, report)
        if not loaded.draft_state.ok:  # a server would go on without
            raise Refusal(loaded.draft_state.reason, loaded.draft_state.message)
        made = cls.of(config, loaded)
        made.tokenizer = Tokenizer(loaded.tokenizer_path)
        return made

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """One for each prompt, in order; all of them run together. Not while requests of add()'s are open.

        Raises BadRequest, and then nothing has run.
        """
        if isinstance(prompts, str) or not all(isinstance(prompt, Iterable) for prompt in prompts):
            raise BadRequest("prompts is a single one; give a list of prompts", "prompts")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise BadRequest(f"{len(each)} params for {len(prompts)} prompts; give one, or one for each", "params")
        texts = {f"prompt {index}": _Text(self.tokenizer, one, self._eos_token_ids) for index, one in enumerate(each)}
        try:
            for request_id, prompt, one in zip(texts, prompts, each, strict=True):
                self.add(AddRequest(request_id, self._ids(prompt), one))
            while self.has_work:
                for delta in self.step().deltas:
                    if texts[delta.request_id].take(delta):
                        self.abort(delta.request_id)
        finally:  # whatever happens, nothing is left behind
            for request_id in texts:
                self.abort(request_id)
        return [text.completion for text in texts.values()]

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        return self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else tuple(prompt)


class _Text:
    """A completion as it comes."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        self.completion = Completion(logprobs=None if params.logprobs is None else [])
        self._detokenizer = Detokenizer(
            tokenizer.token_bytes,
            stop=params.stop,
            hidden={*eos_token_ids, *params.stop_token_ids},
            min_tokens=params.min_tokens,
        )

    def take(self, delta: TokenDelta) -> bool:
        """Whether a stop string has ended it, of which the engine knows nothing."""
        completion = self.completion
        decoded = self._detokenizer.add(delta.token_ids)
        completion.text += decoded.text
        completion.token_ids += delta.token_ids[: decoded.tokens]
        if completion.logprobs is not None and delta.logprobs is not None:
            completion.logprobs += delta.logprobs[: decoded.tokens]
        if decoded.stopped:
            completion.finish_reason = "stop"
        elif delta.finish_reason is not None:
            completion.text += self._detokenizer.finish()
            completion.finish_reason = delta.finish_reason
        return decoded.stopped


def _config(model: str | Path, options: dict[str, object]) -> EngineConfig:
    """By the flags' own parser, so that names, defaults and refusals are the command's."""
    arguments = ["check", "--model", str(model)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            arguments += [flag, str(value)]
    parsed, _ = flags.parse(arguments)
    return flags.engine_config(parsed, {})
