"""What every method is asked: each way to sample, to end, to be told; of prompts that share beginnings and repeat."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.runtime.tiny import VOCAB

from outrider_runtime.sampling.params import MAX_LOGPROBS, SamplingParams
from outrider_runtime.server.openai import CompletionRequest

GREEDY = SamplingParams(max_tokens=14, temperature=0.0)
DRAWN = SamplingParams(max_tokens=14, seed=1)
PENALTIES = {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.3}

_lots = random.Random(0)
_long = tuple(_lots.randrange(4, VOCAB) for _ in range(40))
PROMPTS = {
    "of one token": (17,),
    "of a block and more": tuple(_lots.randrange(4, VOCAB) for _ in range(7)),
    "of ten blocks": _long,
    "with the beginning of another": (*_long[:26], 20, 21),
    "that is another's beginning": _long[:24],
    "that repeats": (11, 12, 13, 14, 15) * 5,
}

WAYS = {
    "greedy": GREEDY,
    "sampled": DRAWN,
    "cold": replace(DRAWN, temperature=0.3, seed=-5),
    "hot": replace(DRAWN, temperature=2.0, seed=2**64 + 17),
    "top-k": replace(DRAWN, top_k=5, seed=2),
    "top-p": replace(DRAWN, top_p=0.8, seed=3),
    "min-p": replace(DRAWN, min_p=0.1, seed=4),
    "top-k, top-p and min-p": replace(DRAWN, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=2**63),
    "greedy, penalties": replace(GREEDY, **PENALTIES),
    "sampled, penalties": replace(DRAWN, **PENALTIES, seed=5),
    "greedy, repetition rewarded": replace(GREEDY, max_tokens=30, repetition_penalty=0.2),
    "greedy, logit bias": replace(GREEDY, logit_bias=((7, 4.0), (9, 3.5), (20, -100.0))),
    "sampled, logit bias": replace(DRAWN, logit_bias=((7, 2.0), (9, 1.5)), seed=6),
    "bad words": replace(DRAWN, bad_words=((8,), (9, 10), (7, 7)), temperature=1.5, seed=7),
    "stop ids": replace(DRAWN, max_tokens=30, stop_token_ids=(7, 8, 9, 10, 11), seed=8),
    "stop ids, greedy": replace(GREEDY, max_tokens=30, stop_token_ids=tuple(range(20, 30))),
    "min_tokens": replace(DRAWN, max_tokens=30, min_tokens=9, stop_token_ids=tuple(range(7, 20)), seed=9),
    "EOS likely": replace(DRAWN, max_tokens=30, logit_bias=((3, 3.0),), seed=10),
    "EOS likely, and ignored": replace(DRAWN, ignore_eos=True, logit_bias=((3, 3.0),), seed=11),
    "one token": replace(DRAWN, max_tokens=1, seed=12),
    "two tokens": replace(GREEDY, max_tokens=2),
    "to the context's end": replace(DRAWN, max_tokens=1000, ignore_eos=True, seed=13),
    "log-probability": replace(DRAWN, logprobs=0, temperature=2.0, logit_bias=((7, 3.0),), seed=14),
    "log-probabilities": replace(GREEDY, logprobs=3),
    "all log-probabilities": replace(DRAWN, logprobs=MAX_LOGPROBS, stop_token_ids=tuple(range(20, 30)), seed=15),
    "fewer drafts": replace(DRAWN, speculative=1, seed=16),
    "no drafts": replace(GREEDY, speculative=0),
}
STOPPED = ("greedy", "sampled", "min_tokens", "log-probabilities", "EOS likely, and ignored")  # by strings, too


@dataclass(frozen=True)
class Asked:
    """One request, by a name that a failure tells."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


def asked() -> Iterator[Asked]:
    """All but those with stop strings, which are made of the texts themselves. Every other way of two prompts."""
    prompts = list(PROMPTS)
    for number, (way, params) in enumerate(WAYS.items()):
        for prompt in (prompts[number % 6], prompts[(number + 3) % 6])[: 2 - number % 2]:
            yield Asked(f"{way}, prompt {prompt}", PROMPTS[prompt], params)
    several = CompletionRequest(model="tiny", prompt=list(PROMPTS["that repeats"]), n=4, seed=17, max_tokens=14)
    choices = several.sampling_params(25, max_model_len=96, vocab_size=VOCAB, encode=lambda text: ())
    for index, params in enumerate(choices):
        yield Asked(f"n > 1, choice {index}", several.prompt, params)
