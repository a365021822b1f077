"""Whether the draft is any good: speculation pauses when too few drafted tokens are accepted, and is tried again on one
pod before it is on everywhere, so that a draft that stays bad costs next to nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider_operator.fleet.policy import Memory
from outrider_operator.fleet.samples import Answer, Sample
from outrider_operator.fleet.windows import View, restarted

WINDOW = 60.0  # seconds over which acceptance is judged
ENOUGH = 500  # drafts in it, below which nothing is judged
FIRST_PAUSE = 60.0  # seconds; each further pause is twice as long
LONGEST_PAUSE = 3600.0  # seconds
TRIAL_ENOUGH = 200  # drafts that decide a trial at once
TRIAL_SECONDS = 30.0  # after which fewer decide it
TRIAL_LEAST = 20  # drafts without which nothing is decided: a quiet pod proves nothing


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


def decide(memory: Memory, floor: float, view: View, at: float, trial_revision: str) -> Memory:
    """The pause and the trial from now on. `floor` is in percent, `at` in seconds since the epoch.

    `view` is of the pods whose draft is the one in question; `trial_revision` is that of the policy a trial pod gets.
    """
    if memory.retry_at:
        return _paused(memory, floor, view, at, trial_revision)
    if memory.disable_at or is_recent(memory.since, at, WINDOW):
        return memory  # nothing is drafted, or what was drafted before still fills the window
    drafted = _within(view)
    if drafted is None or drafted.drafts < ENOUGH or drafted.percent >= floor:
        return memory
    return _failed(memory, at)


def is_recent(since: float, at: float, seconds: float) -> bool:
    """Whether `since` is less than so many seconds ago; a moment in the future comes of a clock that jumped."""
    return 0 <= at - since < seconds


def pause(attempts: int) -> float:
    """Seconds until the next trial, after so many pauses in a row."""
    return float(min(FIRST_PAUSE * 2 ** min(max(attempts, 1) - 1, 10), LONGEST_PAUSE))


def _paused(memory: Memory, floor: float, view: View, at: float, trial_revision: str) -> Memory:
    longest = at + pause(memory.attempts)
    if memory.retry_at > longest:  # the clock jumped back
        memory = replace(memory, retry_at=longest)
    if memory.disable_at or at < memory.retry_at:
        return replace(memory, trial="")
    memory = replace(memory, trial=_trial_pod(memory.trial, view))
    drafted = _since_told(view.ready.get(memory.trial, ()), trial_revision)
    needed = TRIAL_ENOUGH if drafted.seconds < TRIAL_SECONDS else TRIAL_LEAST
    if drafted.drafts < needed:
        return memory
    if drafted.percent >= floor:
        return replace(memory, attempts=0, retry_at=0.0, trial="")
    return _failed(memory, at)


def _failed(memory: Memory, at: float) -> Memory:
    attempts = memory.attempts + 1
    return replace(memory, attempts=attempts, retry_at=at + pause(attempts), trial="")


def _trial_pod(current: str, view: View) -> str:
    """The pod to try on: the one that is at it, else the busiest; none while none can be measured."""
    fit = {name: answer for name, answer in view.fresh.items() if answer.draft_ok}
    if current in fit:
        return current
    return max(fit, key=lambda name: (fit[name].running, name), default="")


def _within(view: View) -> Drafted | None:
    """What all pods drafted within the window; None until samples reach so far back."""
    if view.window(WINDOW) is None:
        return None
    since = view.end - WINDOW
    found = [each for track in view.tracks.values() for each in track.intervals if each.start >= since]
    return Drafted(
        seconds=WINDOW,
        drafts=sum(each.drafts for each in found),
        tokens=sum(each.draft_tokens for each in found),
        accepted=sum(each.accepted_tokens for each in found),
    )


def _since_told(samples: tuple[Sample, ...], revision: str) -> Drafted:
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
