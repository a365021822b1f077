"""Trying again on one pod what is off everywhere: after ever longer pauses, so that what stays bad costs next to
nothing. acceptance.py tries a draft that was seldom right, breakeven.py a threshold that was measured."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_operator.fleet.samples import Answer, Sample
from outrider_operator.fleet.windows import View, restarted

FIRST_PAUSE = 60.0  # seconds; each further pause is twice as long
LONGEST_PAUSE = 3600.0  # seconds
TRIAL_SECONDS = 30.0  # in which a runtime learns what there is to learn


@dataclass(frozen=True, slots=True)
class Drafted:
    """What was drafted over some time, in seconds of the operator's clock."""

    seconds: float = 0.0
    drafts: float = 0.0
    tokens: float = 0.0
    accepted: float = 0.0

    @property
    def percent(self) -> float:
        """Accepted of the drafted tokens. Without any nothing speaks against the draft."""
        return 100.0 * min(1.0, self.accepted / self.tokens) if self.tokens else 100.0


def pause(attempts: int) -> float:
    """Seconds until the next trial, after so many pauses in a row."""
    return float(min(FIRST_PAUSE * 2 ** min(max(attempts, 1) - 1, 10), LONGEST_PAUSE))


def is_recent(since: float, at: float, seconds: float) -> bool:
    """Whether `since` is less than so many seconds ago; a moment in the future comes of a clock that jumped."""
    return 0 <= at - since < seconds


def trial_pod(current: str, view: View) -> str:
    """The pod to try on: the one that is at it, else the busiest; none while none can be measured."""
    fit = {name: answer for name, answer in view.fresh.items() if answer.draft_ok}
    if current in fit:
        return current
    return max(fit, key=lambda name: (fit[name].running, name), default="")


def since_told(samples: tuple[Sample, ...], revision: str) -> Drafted:
    """What the pod drafted since it first showed this revision, as far as its samples reach."""
    first: tuple[float, Answer] | None = None
    last: tuple[float, Answer] | None = None
    for sample in reversed(samples):
        if sample.answer is None:
            continue
        if sample.answer.revision != revision or (first and restarted(first[1].counters, sample.answer.counters)):
            break
        first = (sample.at, sample.answer)
        last = last or first
    if first is None or last is None:
        return Drafted()
    then, now = first[1].counters, last[1].counters
    return Drafted(
        seconds=last[0] - first[0],
        drafts=now.drafts - then.drafts,
        tokens=now.draft_tokens - then.draft_tokens,
        accepted=now.accepted_tokens - then.accepted_tokens,
    )
