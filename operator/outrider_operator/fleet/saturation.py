"""Whether speculation is on: suspended while batches are too full for it to pay, resumed when they no longer are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median_low

from outrider_operator.api.reasons import Reason, SpeculationState
from outrider_operator.api.v1alpha1 import Mode, Saturation, SpeculativeDecoding
from outrider_operator.digest import digest
from outrider_operator.fleet.policy import Memory, Policy
from outrider_operator.fleet.windows import Round, View


def decide(
    memory: Memory, speculation: SpeculativeDecoding, view: View, at: float, scale_out_in_progress: bool
) -> Memory:
    """The state from now on. `at` is seconds since the epoch, for `since`; durations come from the samples alone.

    Equal to `memory` unless something changes, so that a decision can be repeated.
    """
    subject = _subject(speculation)
    if memory.spec_hash != subject:
        memory = _turned(Memory(spec_hash=subject), SpeculationState.ACTIVE, "", at)
    if speculation.mode is Mode.DISABLED:
        return _turned(memory, SpeculationState.DISABLED, Reason.DISABLED_BY_SPEC, at)
    if speculation.mode is Mode.ENABLED:
        return _turned(memory, SpeculationState.ACTIVE, "", at)
    if not view.measurable:
        return memory
    threshold = disable_at(memory, speculation.saturation, view)
    if threshold is None:
        return memory
    window = view.window(speculation.saturation.stabilization_window_seconds)
    if memory.state is SpeculationState.ACTIVE:
        if _held(window, lambda running: running >= threshold):
            suspended = _turned(memory, SpeculationState.SUSPENDED, Reason.SATURATED, at)
            return replace(suspended, disable_at=threshold)
    elif memory.reason == Reason.SATURATED and not scale_out_in_progress:
        resume_at = enable_at(threshold, speculation.saturation)
        if _held(window, lambda running: running <= resume_at):
            return replace(_turned(memory, SpeculationState.ACTIVE, "", at), disable_at=0.0)
    return memory


def policy(memory: Memory, speculation: SpeculativeDecoding) -> Policy:
    """What pods are told."""
    return Policy(
        mode=speculation.mode,
        state=memory.state,
        reason=memory.reason,
        num_speculative_tokens=speculation.num_speculative_tokens,
        min_acceptance_percent=speculation.min_acceptance_percent,
    ).sealed()


def disable_at(memory: Memory, saturation: Saturation, view: View) -> float | None:
    """Mean running requests per replica at which speculation is suspended.

    The spec's; else the one it was suspended at, until it resumes (nothing measures a break-even while nothing is
    drafted); else the median break-even of the ready pods. None when nobody knows one: the reflex alone decides.
    """
    if saturation.disable_at_concurrency is not None:
        return float(saturation.disable_at_concurrency)
    if memory.disable_at:
        return memory.disable_at
    return break_even(view)


def break_even(view: View) -> float | None:
    """The median of what the ready pods measured, the lower of two; None when none did."""
    known = [a.break_even_concurrency for a in view.fresh.values() if a.break_even_concurrency]
    return float(median_low(known)) if known else None


def enable_at(threshold: float, saturation: Saturation) -> float:
    """Mean running requests at or below which speculation resumes: three quarters of the threshold by default."""
    if saturation.enable_at_concurrency is not None:
        return float(saturation.enable_at_concurrency)
    return 0.0 if threshold <= 1 else float(max(1, int(threshold * 3 // 4)))


def saturating(memory: Memory, speculation: SpeculativeDecoding, view: View, patience: float) -> bool:
    """Whether batches are too full now and, staying so, suspend speculation within `patience` seconds.

    Scaling out waits for that: suspending is free, takes effect at once, and may be enough.
    """
    if speculation.mode is not Mode.AUTO or memory.state is not SpeculationState.ACTIVE:
        return False
    threshold = disable_at(memory, speculation.saturation, view)
    if threshold is None or not view.measurable:
        return False
    needed = speculation.saturation.stabilization_window_seconds
    return _held(view.window(max(0.0, needed - patience)), lambda running: running >= threshold)


def _held(window: list[Round] | None, condition: Callable[[float], bool]) -> bool:
    """Whether mean running met the condition in every round; a gap is no proof, nor is a window not yet full."""
    if window is None:
        return False
    return all(not each.gap and condition(each.mean(lambda pod: pod.running)) for each in window)


def _turned(memory: Memory, state: SpeculationState, reason: str, at: float) -> Memory:
    if (memory.state, memory.reason) == (state, reason) and memory.since:
        return memory
    return replace(memory, state=state, reason=str(reason), since=at)


def _subject(speculation: SpeculativeDecoding) -> str:
    """Hash of what speculation is about: another mode, method or draft starts over."""
    draft = speculation.draft
    about = [speculation.mode, speculation.effective_method, draft and [draft.uri, draft.revision]]
    return digest(about, 8)
