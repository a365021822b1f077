"""What a request asks of sampling. Validation happens where it arrives (server/openai.py); here are plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch those off. Penalties are OpenAI's, over the tokens
    generated so far (`repetition_penalty`: prompt and generated, 1 is off). A None `seed` gets one at admission.
    `stop` strings are matched on text by the detokenizer; `stop_token_ids` and EOS by the engine.
    `speculative` is the most tokens drafted for this request: None leaves it to the policy, 0 is plain decoding.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    speculative: int | None = None
