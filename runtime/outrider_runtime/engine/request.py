"""A request inside the engine: its tokens, how far their KV is written, and the blocks that hold it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider_runtime.engine.messages import FinishReason
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.table import Mode, mode_of, reads_text

if TYPE_CHECKING:
    from outrider_runtime.engine.scheduler import Chunk


@dataclass(slots=True, eq=False)
class Request:
    """`computed` tokens of `tokens` have the target's KV written; `draft_computed` (never more) the draft's.

    Results are read a step late: while `flight`, its latest share of a launched step, is out, the device's text may be
    longer than `tokens`.
    """

    request_id: str
    prompt_length: int
    params: SamplingParams
    seed: int  # of the noise; given at admission when params has none
    tokens: list[int]  # prompt, then generated
    arrival: float  # monotonic seconds
    slot: int | None = None  # its row of the device's state; while it runs
    lease: int = 0  # how often it was given one: what an earlier lease's step yields does not count
    flight: Chunk | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    draft_computed: int = 0
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache at first admission
    chain: list[bytes] = field(default_factory=list)  # digests of its full blocks, kv/prefix.py
    published: int = 0  # leading blocks offered to the prefix cache
    draft_published: int = 0  # of which with the draft's KV
    admitted: bool = False  # once, whether or not preempted since
    mode: Mode = field(init=False)  # how its tokens are drawn
    reads_text: bool = field(init=False)  # when they are

    def __post_init__(self) -> None:
        self.mode, self.reads_text = mode_of(self.params), reads_text(self.params)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens whose KV no launched step writes: 1 while decoding, more while a text is being read."""
        if self.flight is None:
            return len(self.tokens) - self.computed
        return 1 if self.flight.samples else len(self.tokens) - self.flight.end

    @property
    def shortest(self) -> int:
        """What the device's text has at least, once the launched step is done; exact unless that drafts."""
        return len(self.tokens) + (self.flight is not None and self.flight.samples)

    @property
    def longest(self) -> int:
        """What it has at most."""
        return self.shortest + (self.flight.draft_length if self.flight else 0)

    def room(self, max_model_len: int) -> int:
        """How many tokens it may still generate, behind those it has for sure."""
        limit = min(self.prompt_length + self.params.max_tokens, max_model_len)
        return limit - self.shortest

    def cut(
        self, tokens: Sequence[int], eos_token_ids: Collection[int], max_model_len: int
    ) -> tuple[list[int], FinishReason | None]:
        """These next tokens up to the one that ends the request, which is included."""
        room = min(self.params.max_tokens - self.generated, max_model_len - len(self.tokens))
        for count, token in enumerate(tokens, start=1):
            if token in self.params.stop_token_ids or (token in eos_token_ids and not self.params.ignore_eos):
                return list(tokens[:count]), "stop"
            if count == room:
                return list(tokens[:count]), "length"
        return list(tokens), None
