"""What may happen to an engine, by chance: requests of all kinds come and go, policies change, time passes."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from tests.runtime.engine.driver import MAX_MODEL_LEN, ON, SUSPENDED, Collector, assert_all_free, make_engine
from tests.runtime.losslessness.plain import everything, plain, target
from tests.runtime.losslessness.restless import Whimsical
from tests.runtime.losslessness.shadow import Shadow

from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.sampling.table import Mode, mode_of

STEPS = 90  # until everybody is let come to an end
MOST_OPEN = 7  # requests; more than run at a time


def happenings(seed: str, method: str, shadow: Shadow) -> int:
    """To one engine of any shape, from its first request to its last. Whatever is wrong is an error that names the
    seed. How many steps it took."""
    events = Events(method, random.Random(f"{seed}, {method}"), shadow)
    try:
        for _ in range(STEPS):
            events.happen()
            events.step()
        events.end()
    except Exception as error:
        error.add_note(f"happenings({seed!r}, {method!r}, ...), step {events.steps}")
        raise
    return events.steps


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Events:
    """One engine, and what happens to it."""

    def __init__(self, method: str, lots: random.Random, shadow: Shadow) -> None:
        self.lots, self.clock, self.steps = lots, Clock(), 0
        self.collector, self.open, self.aborted = Collector(), dict[str, int](), dict[str, int]()
        block_size, concurrency = lots.choice((1, 4, 16)), lots.randint(1, 4)
        self.engine = make_engine(
            method,
            block_size=block_size,
            blocks=-(-lots.randint(MAX_MODEL_LEN, 240) // block_size),
            budget=lots.randint(4, 40),
            concurrency=concurrency,
            k=lots.randint(1, 4),
            prefix_caching=lots.random() < 0.8,
            overlap=lots.random() < 0.5,
            target=target(torch.float64),
            clock=self.clock,
        )
        hardest = lots.choice(list(Mode))  # to draw
        self.numbers = [
            number
            for number, asked in enumerate(everything())
            if not asked.params.stop and mode_of(asked.params) <= hardest
        ]
        Whimsical.rules(self.engine, lots)
        self.watch = shadow.watch(self.engine, lots)
        self.texts = 0

    def happen(self) -> None:
        """Something or other, before a step."""
        lots, most = self.lots, self.engine.config.speculation.max_tokens
        if len(self.open) < MOST_OPEN and (not self.open or lots.random() < 0.3):
            for _ in range(lots.randint(1, 3)):
                self.add()
        if self.open and lots.random() < 0.04:
            name = lots.choice(list(self.open))
            self.aborted[name] = self.open.pop(name)
            self.engine.abort(name)
        pauses = lots.random() < 0.05
        if pauses or lots.random() < 0.5:
            length = 0 if pauses or lots.random() < 0.2 else lots.randint(1, most)
            self.engine.set_policy(replace(ON, num_speculative_tokens=length) if length else SUSPENDED)
        self.clock.now += 3.0 if pauses else 0.02

    def add(self) -> None:
        number = self.lots.choice(self.numbers)
        name, asked = f"{self.texts} is {number}", everything()[number]
        params = asked.params
        if self.lots.random() < 0.2:
            params = replace(params, speculative=self.lots.randint(0, 3))
        self.engine.add(AddRequest(name, asked.prompt, params))
        self.open[name] = number
        self.texts += 1

    def step(self) -> None:
        self.collector.take(self.engine.step().deltas)
        self.steps += 1
        self.watch.check()
        for name, number in list(self.open.items()):
            if (reason := self.collector.finish_reason(name)) is not None:
                del self.open[name]
                expected = plain()[number]
                found = list(self.collector.tokens(name)), reason
                assert found == (expected.token_ids, expected.finish_reason), everything()[number]

    def end(self) -> None:
        while self.engine.has_work:
            self.step()
        for name, number in self.aborted.items():
            tokens = list(self.collector.tokens(name))
            assert tokens == plain()[number].token_ids[: len(tokens)], everything()[number]
        self.watch.check_published()
        assert_all_free(self.engine)
