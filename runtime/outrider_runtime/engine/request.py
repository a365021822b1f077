"""A request inside the engine: its tokens, how far their KV is written, and the blocks that hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider_runtime.sampling.params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """`computed` tokens of `tokens` have the target's KV written; `draft_computed` (never more) the draft's."""

    request_id: str
    prompt_length: int
    params: SamplingParams
    seed: int  # of the noise; given at admission when params has none
    tokens: list[int]  # prompt, then generated
    arrival: float  # monotonic seconds
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    draft_computed: int = 0
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache at admission

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length
