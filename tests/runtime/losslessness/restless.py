"""Engines that are told another policy before every step, or whose reflex decides as chance has it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from tests.runtime.engine.driver import ON, SUSPENDED

from outrider_runtime.engine import engine
from outrider_runtime.engine.messages import StepOutput
from outrider_runtime.offline import Engine
from outrider_runtime.speculation.adaptive import Adaptive, Decision, Decoding


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


class Whimsical(Adaptive):
    """Within what policy, requests and blocks allow, anything: what one drafts and reads has nothing to do with others
    and the step before."""

    lots: random.Random

    @classmethod
    def rules(cls, engine: engine.Engine, lots: random.Random) -> None:
        """From now on this engine, if anything drafts for it."""
        if (reflex := engine._reflex) is not None:
            concurrency, proposer = engine.config.scheduler.max_concurrency, engine._runner.proposer
            sizes = engine._runner.draft_sizes
            reflex.adaptive = cls(
                reflex.table, engine.policy, max_concurrency=concurrency, reads_prompts=proposer.reads, sizes=sizes
            )
            reflex.adaptive.lots = lots
            reflex.pays = lambda requests, now: int(now) % 7 < 5

    def decide(self, decoding: Decoding, prompt_tokens: int, now: float, arriving: int = 0) -> Decision:
        self._follows = self._reads_prompts and self.allowed > 0 and self.lots.random() < 0.7
        room = self._most_reads(prompt_tokens)
        lengths, reads = [], []
        for cap, missed in zip(decoding.caps.tolist(), decoding.missed.tolist(), strict=True):
            most = min(cap, self.allowed)
            lengths.append(self.lots.choice((most, self.lots.randint(0, most))))
            most = min(missed, room) if most else 0
            reads.append(self.lots.choice((0, most, self.lots.randint(0, most))))
            room -= reads[-1]
        return self._decision(decoding, np.array(lengths, np.int64), np.array(reads, np.int64), prompt_tokens)
