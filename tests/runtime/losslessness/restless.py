"""An engine that is told another policy before every step."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.runtime.engine.driver import ON, SUSPENDED

from outrider_runtime.engine.messages import StepOutput
from outrider_runtime.offline import Engine


class Restless(Engine):
    """No speculation, or another draft length. Notes whether a request had to give its blocks back."""

    preempted = False

    def step(self) -> StepOutput:
        waiting = self.stats().waiting
        lots = random.Random(self.stats().generated_tokens)
        lengths = range(1, self.config.speculation.max_tokens + 1)
        policies = [SUSPENDED, *(replace(ON, num_speculative_tokens=length) for length in lengths)]
        self.set_policy(lots.choice(policies))
        output = super().step()
        self.preempted |= output.stats.waiting > waiting
        return output
