"""Whether speculation is on: suspended while batches are too full for it to pay, resumed when they no longer are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider_operator.api.reasons import Reason, SpeculationState
from outrider_operator.api.v1alpha1 import Mode, Saturation, SpeculativeDecoding, SpeculativeModelSpec
from outrider_operator.digest import digest
from outrider_operator.fleet import acceptance, breakeven
from outrider_operator.fleet.policy import Memory, Policy
from outrider_operator.fleet.trial import TRIAL_SECONDS, is_recent
from outrider_operator.fleet.windows import Round, View


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision looks at. `at` is seconds since the epoch, for what has to outlive the operator; durations within
    the samples come from the samples alone. `current` are the ready pods of the current template."""

    spec: SpeculativeModelSpec
    view: View
    at: float
    scale_out_in_progress: bool = False
    current: frozenset[str] = frozenset()


def decide(memory: Memory, s: Situation) -> Memory:
    """The state from now on. Equal to `memory` unless something changes, so that a decision can be repeated.

    Speculation is off while load saturates the batches, or acceptance was too low: two causes with a memory each.
    """
    speculation = s.spec.speculative_decoding
    if memory.spec_hash != (subject := _subject(speculation)):
        memory = Memory(spec_hash=subject)
    if speculation.mode is Mode.DISABLED:
        return _turned(memory, SpeculationState.DISABLED, Reason.DISABLED_BY_SPEC, s.at)
    if speculation.mode is Mode.AUTO:
        memory = _by_acceptance(memory, s)
        memory = _by_load(memory, s)
    return _turned(memory, *_outcome(memory), s.at)


def _by_acceptance(memory: Memory, s: Situation) -> Memory:
    speculation, about = s.spec.speculative_decoding, _drafting(s.spec)
    floor = speculation.min_acceptance_percent
    if floor is None or (memory.retry_at and memory.paused_for != about):
        on_trial = memory.trial if memory.disable_at else ""  # which is then none of the draft's
        memory = replace(memory, attempts=0, retry_at=0.0, trial=on_trial, paused_for="")
    if floor is None or not s.view.measurable:
        return memory
    decided = acceptance.decide(memory, floor, s.view.of_pods(s.current), s.at, trial(speculation).revision)
    return replace(decided, paused_for=about if decided.retry_at else "")


def _by_load(memory: Memory, s: Situation) -> Memory:
    saturation = s.spec.speculative_decoding.saturation
    threshold = disable_at(memory, saturation, s.view)
    if threshold is None or not s.view.measurable:
        return memory
    window = s.view.window(saturation.stabilization_window_seconds)
    if not memory.disable_at:
        return _suspended(memory, s, threshold) if _held(window, lambda running: running >= threshold) else memory
    if s.scale_out_in_progress:
        return memory
    memory = _measured_anew(memory, s)
    resume_at = enable_at(saturation.disable_at_concurrency or memory.disable_at, saturation)
    if memory.disable_at and _held(window, lambda running: running <= resume_at):
        return replace(memory, disable_at=0.0, remeasure_at=0.0, trial="")
    return memory


def _suspended(memory: Memory, s: Situation, threshold: float) -> Memory:
    saturation = s.spec.speculative_decoding.saturation
    if saturation.disable_at_concurrency is not None:
        return replace(memory, disable_at=threshold, trial="")
    settling = is_recent(memory.since, s.at, _settling(saturation))
    return memory if settling else breakeven.suspend(memory, threshold, s.at)


def _settling(saturation: Saturation) -> float:
    """Seconds in which a break-even that has just become known must not turn what has just been turned: pods have yet
    to measure theirs. A threshold that the spec gives waits for nobody."""
    if saturation.disable_at_concurrency is not None:
        return 0.0
    return max(float(saturation.stabilization_window_seconds), TRIAL_SECONDS)


def _measured_anew(memory: Memory, s: Situation) -> Memory:
    speculation = s.spec.speculative_decoding
    given = speculation.saturation.disable_at_concurrency
    if given is not None:
        return replace(memory, disable_at=float(given), remeasured=0, remeasure_at=0.0, trial="")
    return breakeven.remeasure(memory, s.view.of_pods(s.current), s.at, trial(speculation).revision)


def _outcome(memory: Memory) -> tuple[SpeculationState, str]:
    if memory.disable_at:
        return SpeculationState.SUSPENDED, Reason.SATURATED
    if memory.retry_at:
        return SpeculationState.SUSPENDED, Reason.LOW_ACCEPTANCE
    return SpeculationState.ACTIVE, ""


def policy(memory: Memory, speculation: SpeculativeDecoding) -> Policy:
    """What pods are told."""
    return Policy(
        mode=speculation.mode,
        state=memory.state,
        reason=memory.reason,
        num_speculative_tokens=speculation.num_speculative_tokens,
        min_acceptance_percent=speculation.min_acceptance_percent,
    ).sealed()


def trial(speculation: SpeculativeDecoding) -> Policy:
    """What a pod is told on which speculation is tried again."""
    return policy(Memory(state=SpeculationState.ACTIVE), speculation)


def disable_at(memory: Memory, saturation: Saturation, view: View) -> float | None:
    """Mean running requests per replica at which speculation is suspended.

    The spec's; else the one it was suspended at, until it resumes or a trial raises it (see breakeven.py); else the
    median break-even of the ready pods. None when nobody knows one, or where drafting does not even pay for a single
    request, which is no matter of load: the reflex alone decides.
    """
    if saturation.disable_at_concurrency is not None:
        return float(saturation.disable_at_concurrency)
    if memory.disable_at:
        return memory.disable_at
    even = breakeven.break_even(view)
    return even if even is not None and even > 1 else None


def enable_at(threshold: float, saturation: Saturation) -> float:
    """Mean running requests at or below which speculation resumes: three quarters of the threshold by default."""
    if saturation.enable_at_concurrency is not None:
        return float(saturation.enable_at_concurrency)
    return 0.0 if threshold <= 1 else float(max(1, int(threshold * 3 // 4)))


def saturating(memory: Memory, speculation: SpeculativeDecoding, view: View, patience: float, at: float) -> bool:
    """Whether batches are too full now and, staying so, suspend speculation within `patience` seconds.

    Scaling out waits for that: suspending is free, takes effect at once, and may be enough.
    """
    if speculation.mode is not Mode.AUTO or memory.state is not SpeculationState.ACTIVE:
        return False
    threshold = disable_at(memory, speculation.saturation, view)
    if threshold is None or not view.measurable:
        return False
    if is_recent(memory.since, at, _settling(speculation.saturation) - patience):
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
    """Hash of what speculation is about: another mode, method, draft or tree starts over."""
    draft, tree = speculation.draft, speculation.tree
    about: list[object] = [speculation.mode, speculation.effective_method, draft and [draft.uri, draft.revision]]
    if tree is not None:  # without one the hash is what older operators made of it, or an upgrade would start all over
        about.append([tree.top_k, tree.max_tokens])
    return digest(about, 8)


def _drafting(spec: SpeculativeModelSpec) -> str:
    """Hash of what acceptance depends on, besides the text: another of these is worth trying at once."""
    speculation = spec.speculative_decoding
    tokens, floor = speculation.num_speculative_tokens, speculation.min_acceptance_percent
    return digest([_subject(speculation), spec.model.uri, spec.model.revision, tokens, floor], 8)
