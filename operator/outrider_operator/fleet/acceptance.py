"""Whether the draft is any good: speculation pauses when too few drafted tokens are accepted, and is tried again on one
pod before it is on everywhere, so that a draft that stays bad costs next to nothing."""

from __future__ import annotations

from dataclasses import replace

from outrider_operator.fleet.policy import Memory
from outrider_operator.fleet.trial import TRIAL_SECONDS, Drafted, is_recent, pause, since_told, trial_pod
from outrider_operator.fleet.windows import View

WINDOW = 60.0  # seconds over which acceptance is judged
ENOUGH = 500  # drafts in it, below which nothing is judged
TRIAL_ENOUGH = 200  # drafts that decide a trial at once
TRIAL_LEAST = 20  # drafts without which nothing is decided: a quiet pod proves nothing


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


def _paused(memory: Memory, floor: float, view: View, at: float, trial_revision: str) -> Memory:
    longest = at + pause(memory.attempts)
    if memory.retry_at > longest:  # the clock jumped back
        memory = replace(memory, retry_at=longest)
    if memory.disable_at:
        return memory  # batches are full: a trial now is none of the draft's
    if at < memory.retry_at:
        return replace(memory, trial="")
    memory = replace(memory, trial=trial_pod(memory.trial, view))
    drafted = since_told(view.ready.get(memory.trial, ()), trial_revision)
    needed = TRIAL_ENOUGH if drafted.seconds < TRIAL_SECONDS else TRIAL_LEAST
    if drafted.drafts < needed:
        return memory
    if drafted.percent >= floor:
        return replace(memory, attempts=0, retry_at=0.0, trial="")
    return _failed(memory, at)


def _failed(memory: Memory, at: float) -> Memory:
    attempts = memory.attempts + 1
    return replace(memory, attempts=attempts, retry_at=at + pause(attempts), trial="")


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
