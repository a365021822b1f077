"""How many replicas: the load in flight over the target for each, quick on the way up and patient on the way down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from outrider_operator.api.v1alpha1 import Autoscaling
from outrider_operator.fleet.history import LOAD_WINDOW
from outrider_operator.fleet.windows import Interval, View

TOLERANCE = 0.1  # of the target: a smaller deviation changes nothing
STEP_PERIOD = timedelta(minutes=1)  # over which steps up are limited
SCALE_OUT_LIMIT = timedelta(minutes=10)  # after which a pod that cannot be scheduled blocks nothing any more
HEADROOM = 0.9  # of the saturation threshold: fewer replicas must not bring saturation with them
REMEMBERED = 5  # decisions kept in status


@dataclass(frozen=True, slots=True)
class Past:
    """A decision as status remembers it."""

    at: datetime
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision looks at. `current` is the number of replicas asked for now, ready or not."""

    autoscaling: Autoscaling
    current: int
    view: View
    past: Sequence[Past]  # oldest first, at most REMEMBERED
    at: datetime
    disable_at: float | None = None  # while speculation is active: the concurrency that would suspend it
    hold_scale_out: bool = False  # speculation is about to be suspended, which may be enough


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas from now on, and in words why, which is empty when nothing changes."""

    replicas: int
    reason: str = ""


def decide(s: Situation) -> Decision:
    """Level-triggered: it depends on what is, and deciding again on what was decided changes nothing."""
    least, most = s.autoscaling.min_replicas, s.autoscaling.max_replicas
    bound = ""
    if s.current < least:
        s, bound = replace(s, current=least), f"minReplicas is {least}"
    elif s.current > most:
        s, bound = replace(s, current=most), f"maxReplicas is {most}"
    decision = _by_load(s) if s.view.measurable else Decision(s.current)
    return decision if decision.reason else Decision(s.current, bound)


def load_now(view: View) -> float | None:
    """Mean requests in flight over the last seconds, all ready pods together; None until so much was seen.

    An unmeasured pod counts nothing: what is not known is no reason to grow.
    """
    window = view.past(LOAD_WINDOW)
    return None if window is None else sum(each.total(_in_flight, 0.0) for each in window) / len(window)


def load_peak(view: View, seconds: float, assumed: float) -> float | None:
    """The most requests in flight in any period of the window; None while the window has a hole.

    An unmeasured pod counts `assumed`: what is not known is no reason to shrink.
    """
    window = view.past(seconds)
    if window is None or any(not each.measured and not each.unmeasured for each in window):
        return None
    unread = sum(1 for those in view.ready.values() if len(those) < 2)
    return max(each.total(_in_flight, assumed) for each in window) + assumed * unread


def scale_out_in_progress(view: View, target: int, desired: int, past: Sequence[Past], at: datetime) -> bool:
    """Whether replicas that the load needs are on their way, and have not been for too long."""
    started = _last_step_up(past)
    if started is None or len(view.ready) >= desired or not _within(SCALE_OUT_LIMIT, started, at):
        return False
    load = load_now(view)
    return load is None or load > target * len(view.ready)


def _by_load(s: Situation) -> Decision:
    up = _up(s)
    return up if up.reason else _down(s)


def _up(s: Situation) -> Decision:
    target = s.autoscaling.target_concurrency
    load = load_now(s.view)
    if load is None:
        return Decision(s.current)
    wanted, reason = s.current, ""
    if load > target * s.current * (1 + TOLERANCE) and not s.hold_scale_out:
        wanted = _needed(load, target)
        reason = f"{load:.1f} requests in flight need {wanted} replicas at {target} each"
    rejected = _rejected(s)
    if rejected and wanted <= s.current:
        wanted, reason = s.current + 1, f"{rejected:.0f} requests were rejected within {LOAD_WINDOW:.0f} s"
    limit, spent = _limit(s), wanted
    wanted = min(wanted, limit, s.autoscaling.max_replicas)
    if wanted <= s.current:
        return Decision(s.current)
    if wanted < spent:
        bound = "maxReplicas" if wanted == s.autoscaling.max_replicas else "the step limit of one minute"
        reason += f"; {bound} allows {wanted}"
    return Decision(wanted, reason)


def _limit(s: Situation) -> int:
    """The most replicas there may be now: double those of a minute ago, or scaleUpMaxStep more if that is more."""
    recent = [each for each in s.past if abs(s.at - each.at) < STEP_PERIOD]
    if len(recent) >= REMEMBERED:
        return s.current  # how many there were a minute ago is no longer remembered
    base = min((each.before for each in recent), default=s.current)
    base = min(base, s.current)
    return max(2 * base, base + s.autoscaling.scale_up_max_step, s.current)


def _rejected(s: Situation) -> float:
    """Requests turned away since the fleet settled. Until it has, the replicas to come are the answer to them."""
    started = _last_step_up(s.past)
    since = s.view.end - LOAD_WINDOW
    settled = all(track.since <= since for track in s.view.tracks.values())
    if started is not None:
        waiting = len(s.view.ready) < s.current and _within(SCALE_OUT_LIMIT, started, s.at)
        settled = settled and not waiting and abs(s.at - started) >= timedelta(seconds=LOAD_WINDOW)
    if not settled:
        return 0.0
    found = (pod for track in s.view.tracks.values() for pod in track.intervals if pod.start >= since)
    return sum(pod.rejected_requests for pod in found)


def _down(s: Situation) -> Decision:
    target, window = s.autoscaling.target_concurrency, s.autoscaling.scale_down_window_seconds
    load, now = load_peak(s.view, window, target), load_now(s.view)
    if load is None or now is None:
        return Decision(s.current)
    seen = f"at most {load:.1f} requests in flight within {window} s"
    if _needed(now, target) > _needed(load, target):  # the way up would bring back what is taken away
        load, seen = now, f"{now:.1f} requests in flight"
    if load > target * s.current * (1 - TOLERANCE):
        return Decision(s.current)
    wanted = max(_needed(load, target), s.autoscaling.min_replicas)
    reason = f"{seen} need {wanted} replicas at {target} each"
    if s.disable_at is not None:
        roomy = math.floor(load / (HEADROOM * s.disable_at)) + 1
        if roomy > wanted:
            wanted = roomy
            reason = f"{seen}; fewer than {wanted} replicas would come near saturation at {s.disable_at:g} each"
    return Decision(wanted, reason) if wanted < s.current else Decision(s.current)


def _needed(load: float, target: int) -> int:
    return math.ceil(load / target - 1e-9)  # a mean of sums that should be whole may be a hair above


def _last_step_up(past: Sequence[Past]) -> datetime | None:
    """By the order of the decisions: the latest time may be from before the clock jumped back."""
    return next((each.at for each in reversed(past) if each.after > each.before), None)


def _within(limit: timedelta, then: datetime, now: datetime) -> bool:
    """Whatever a clock that jumped back says, nothing stays within a limit for longer than twice that."""
    return abs(now - then) <= limit


def _in_flight(pod: Interval) -> float:
    return pod.in_flight
