"""What a step costs and what it brings: the table from which simulated pods take their service rates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """A roofline, in seconds: reading the weights hides computing for a while, then computing is what takes time.

    The default is a card that reads its weights in 26 ms and computes them for 37 tokens meanwhile, so that drafting
    four tokens of which 70 % are right each stops paying at 20 running requests.
    """

    weights: float = 0.026
    token: float = 0.0007  # to compute one token
    request: float = 0.0002  # to read the keys and values of one request
    draft: float = 0.0026  # to draft one token for all

    def step(self, running: int, tokens: int) -> float:
        """Seconds of one step of so many requests with so many drafted tokens each."""
        verified = max(self.weights, running * (tokens + 1) * self.token)
        return verified + running * self.request + tokens * self.draft

    def rate(self, running: int, tokens: int, acceptance: float) -> float:
        """Tokens per second of each running request."""
        return emitted(tokens, acceptance) / self.step(running, tokens)

    def best(self, running: int, most: int, acceptance: float) -> int:
        """The draft length of the highest rate, as a runtime that adapts it would choose."""
        return max(range(most + 1), key=lambda tokens: self.rate(running, tokens, acceptance))

    def break_even(self, tokens: int, acceptance: float, most: int = 256) -> int | None:
        """The fewest running requests at which drafting no longer pays; None when it does up to `most`."""
        losing = (n for n in range(1, most + 1) if self.rate(n, tokens, acceptance) <= self.rate(n, 0, acceptance))
        return next(losing, None)


def emitted(tokens: int, acceptance: float) -> float:
    """Mean tokens of one verification, when each drafted token after an accepted one is accepted with `acceptance`."""
    return sum(acceptance**position for position in range(tokens + 1))
