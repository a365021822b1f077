"""Plain decoding: the texts of an engine that never drafts; and transformers' own forward over such a text, at once.

That the texts are right is checked by that forward: behind the tokens before it, every token must be the one with the
highest score. By induction that is the text that a loop of whole forwards, one for each token, would have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from tests.runtime.engine.driver import EOS, MAX_MODEL_LEN, make_engine
from tests.runtime.losslessness.asked import STOPPED, Asked, asked
from tests.runtime.tiny import VOCAB, ours, reference_model
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel

from outrider_runtime.engine.detokenize import TokenBytes, byte_level_alphabet
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.offline import Completion, Engine
from outrider_runtime.sampling.pipeline import Row, scores

NEAR = 1e-5  # scores that rounding to float32 may put in another order


@cache
def target(dtype: torch.dtype, device: str = "cpu") -> LlamaForCausalLM:
    return ours(reference_model(), dtype, device)


@cache
def reference(weights: torch.dtype = torch.float32, *, exact: bool = True) -> PreTrainedModel:
    """transformers' model with the target's weights, as they are in this type; `exact`: computing in float64."""
    model = reference_model().to(weights)
    return model.double() if exact else model


class Texts:
    """What an engine's `tokenizer` is to it: bytes for each id, so that characters of several tokens come up."""

    def __init__(self) -> None:
        spelled = {byte: character for character, byte in byte_level_alphabet().items()}
        held = [*b" abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW", *"é€".encode(), *b"0123456789"][:VOCAB]
        backend = Tokenizer(models.BPE({spelled[byte]: id for id, byte in enumerate(held)}, []))
        backend.decoder = decoders.ByteLevel()
        self.token_bytes = TokenBytes(backend)


def speaking(method: str, kind: type[Engine] = Engine, **settings) -> Engine:
    """driver.py's engine, whose generate() takes token ids and gives text."""
    engine = make_engine(method, kind=kind, **settings)
    assert isinstance(engine, Engine)
    engine.tokenizer = Texts()
    return engine


def generate(engine: Engine, requests: Sequence[Asked]) -> list[Completion]:
    return engine.generate([each.prompt for each in requests], [each.params for each in requests])


@cache
def everything() -> tuple[Asked, ...]:
    """Those with stop strings too: three characters of the plain text."""
    requests = tuple(asked())
    stopped = []
    for each, completion in zip(requests, decoded(requests), strict=True):
        if each.name.split(", prompt")[0] in STOPPED and len(completion.text) > 8:
            begin = len(completion.text) * 3 // 4  # past min_tokens
            stop = (completion.text[begin : begin + 3], "never this")
            stopped.append(Asked(f"stop string, {each.name}", each.prompt, replace(each.params, stop=stop)))
    return requests + tuple(stopped)


@cache
def plain() -> tuple[Completion, ...]:
    """Of everything(), in order."""
    return decoded(everything())


def decoded(requests: Sequence[Asked]) -> tuple[Completion, ...]:
    """Plainly, in float64."""
    engine = speaking("no speculation", target=target(torch.float64), blocks=400, prefix_caching=False, overlap=False)
    return tuple(generate(engine, requests))


def logits_of(request: Asked, tokens: Sequence[int], model: PreTrainedModel | None = None) -> torch.Tensor:
    """Behind the prompt and behind each of the tokens but the last, [tokens, vocab] float64."""
    with torch.inference_mode():
        logits = (model or reference())(torch.tensor([[*request.prompt, *tokens]])).logits
    return logits[0, len(request.prompt) - 1 : -1].double()


def scored(request: Asked, tokens: Sequence[int], model: PreTrainedModel | None = None) -> torch.Tensor:
    """What the draw of each of the tokens compares, behind the tokens before it, [tokens, vocab]."""
    text, start = [*request.prompt, *tokens], len(request.prompt)
    seed = request.params.seed or 0
    rows = [Row(request.params, seed, text[:position], start) for position in range(start, len(text))]
    return scores(logits_of(request, tokens, model), rows, (EOS,))


def behind_the_best(request: Asked, tokens: Sequence[int]) -> list[float]:
    """By how much each token's score falls short of the highest behind the tokens before it: 0 if it is that one."""
    found = scored(request, tokens)
    own = found.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    return (found.amax(1) - own).tolist()


def end(request: Asked, tokens: Sequence[int]) -> str | None:
    """Why a text ends with the last of these tokens; None if it should not, or sooner. Stop strings apart."""
    last = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else (EOS,))}
    limit = min(request.params.max_tokens, MAX_MODEL_LEN - len(request.prompt))
    if any(token in last for token in tokens[:-1]) or len(tokens) > limit:
        return None
    return "stop" if tokens[-1] in last else "length" if len(tokens) == limit else None
