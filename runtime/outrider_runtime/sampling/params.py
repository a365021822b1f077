"""What a request asks of sampling. Validation happens where it arrives (server/openai.py); here are plain values."""

from __future__ import annotations

from dataclasses import dataclass

# What fits into a request's row on the device (table.py); more is refused where it arrives.
MAX_LOGIT_BIAS = 1024  # OpenAI's limit is 300
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 16
MAX_LOGPROBS = 20  # OpenAI's, of a chat


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those off. Penalties are OpenAI's, over the
    tokens generated so far (`repetition_penalty`: prompt and generated, 1 is off). A None `seed` gets one at admission.
    `logit_bias` has pairs of a token id, each at most once, and what is added to its logit. `bad_words` are sequences
    of token ids of which none shall be generated. `logprobs` is how many of the likeliest tokens are told with each
    token, beside itself; None is none, nor itself.
    `stop` strings are matched on text by the detokenizer; `stop_token_ids` and EOS by the engine.
    `speculative` is the most tokens drafted for this request: None leaves it to the policy, 0 is plain decoding.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    speculative: int | None = None
