"""The engine: requests in, tokens out, one step at a time. A step is schedule, run, postprocess."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from outrider_runtime.config import EngineConfig
from outrider_runtime.engine.messages import AddRequest, EngineStats, StepOutput
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.speculation.policy import Policy


class Engine:
    """Not thread-safe: one thread adds, aborts, sets the policy and steps, in any order between two steps."""

    max_model_len: int  # prompt and generated tokens together; never more than the KV cache holds
    policy: Policy

    def __init__(
        self,
        config: EngineConfig,
        target: LlamaForCausalLM,
        draft: LlamaForCausalLM | None = None,
        *,
        eos_token_ids: Collection[int] = (),
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Modules are loaded and on their device. Without a draft, the method `draft-model` decodes plainly.

        `max_model_len` None is the config's, else the model's. Raises Refusal(DoesNotFit) when the KV cache cannot
        hold one request of that length.
        """
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether step() would do anything."""
        raise NotImplementedError

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises BadRequest: prompt empty or too long, token ids out of range, id in use."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks; unknown or finished ones are ignored. No delta follows."""
        raise NotImplementedError

    def set_policy(self, policy: Policy) -> None:
        """In force from the next step on."""
        raise NotImplementedError

    def step(self) -> StepOutput:
        """One forward of the target over what the scheduler chose. No deltas while prompts are still read."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Counters, and the integrals up to now; cheap enough for every step."""
        raise NotImplementedError
