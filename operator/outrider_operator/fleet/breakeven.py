"""The concurrency from which drafting no longer pays, as pods measured it. While load has suspended speculation nothing
is drafted and so nothing measured: without another look, a measurement of bad times would hold for as long as the load.
So the threshold is frozen, and one pod measures it anew now and then."""

from __future__ import annotations

from dataclasses import replace
from statistics import median_low

from outrider_operator.fleet.policy import Memory
from outrider_operator.fleet.trial import TRIAL_SECONDS, is_recent, pause, since_told, trial_pod
from outrider_operator.fleet.windows import View

KNOWN = 50  # drafts in a trial after which "no break-even" means that drafting pays at any load, not that it is unknown


def break_even(view: View) -> float | None:
    """The median of what the ready pods measured, the lower of two; None when none did."""
    known = [a.break_even_concurrency for a in view.fresh.values() if a.break_even_concurrency]
    return float(median_low(known)) if known else None


def suspend(memory: Memory, threshold: float, at: float) -> Memory:
    """Load suspends speculation at a measured threshold. The pauses until it is measured anew go on growing if a trial
    was what had resumed it, a moment ago."""
    again = is_recent(memory.since, at, pause(memory.remeasured))
    remeasured = memory.remeasured if again else 0
    return replace(
        memory, disable_at=threshold, remeasured=remeasured, remeasure_at=at + pause(remeasured + 1), trial=""
    )


def remeasure(memory: Memory, view: View, at: float, trial_revision: str) -> Memory:
    """The threshold from now on, while load has suspended speculation; a trial can only raise it. The reflex loop of
    the pod on trial sees to it that it costs little. `view` is of the pods that can be tried."""
    longest = at + pause(memory.remeasured + 1)
    if not 0 < memory.remeasure_at <= longest:  # the clock jumped back, or the threshold was the spec's until now
        memory = replace(memory, remeasure_at=longest)
    if at < memory.remeasure_at:
        return replace(memory, trial="")
    pod = trial_pod(memory.trial, view)
    drafted = since_told(view.ready.get(pod, ()), trial_revision)
    if drafted.seconds < TRIAL_SECONDS:
        return replace(memory, trial=pod)
    memory = replace(memory, remeasured=memory.remeasured + 1, trial="")
    found = view.fresh[pod].break_even_concurrency
    if found is None and drafted.drafts >= KNOWN:
        return replace(memory, disable_at=0.0, remeasure_at=0.0)
    threshold = max(memory.disable_at, float(found or 0))
    return replace(memory, disable_at=threshold, remeasure_at=at + pause(memory.remeasured + 1))
