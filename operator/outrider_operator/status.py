"""The whole status object, from what is observed and planned. Equal again while nothing worth a write changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider_operator import labels
from outrider_operator.api.reasons import ConditionType, Reason, SpeculationState
from outrider_operator.clock import written
from outrider_operator.conditions import conditions, timestamp
from outrider_operator.facts import Facts
from outrider_operator.fleet.autoscale import REMEMBERED
from outrider_operator.render.service import url

if TYPE_CHECKING:
    from datetime import datetime

    from outrider_operator.observe import Observed
    from outrider_operator.plan import Plan, Scaling

NUMBERS_EVERY = 60.0  # seconds between writes that only move a number

# moving numbers and the change worth a write
_MATERIAL = {
    "effectiveTokens": 0.3,
    "acceptancePercent": 3.0,
    "acceptedLength": 0.2,
    "speedup": 0.1,
    "runningConcurrency": 0.5,
    "breakEvenConcurrency": 1.0,
}


def status(observed: Observed, plan: Plan) -> dict[str, Any]:
    """status as JSON, fields without a value left out. Compare with the last one by `differs`."""
    facts = Facts(observed, plan)
    before = observed.model.status
    result = {
        "observedGeneration": observed.model.generation,
        "replicas": facts.counted("replicas"),
        "readyReplicas": facts.counted("readyReplicas"),
        "updatedReplicas": facts.counted("updatedReplicas"),
        "desiredReplicas": facts.desired,
        "selector": f"{labels.MODEL}={observed.model.name}",
        "url": url(observed.model),
        "model": _model(facts, before),
        "draft": _draft(facts, before),
        "speculativeDecoding": _speculation(facts, before),
        "autoscaling": _autoscaling(facts, before),
        "conditions": conditions(facts),
    }
    return {name: value for name, value in result.items() if value is not None}


def differs(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Whether `new` is worth a write. Times are carried over from `old`, so equality says it all; a condition of a
    type that is not ours is somebody else's, stays whatever we write, and does not count."""
    types = set(ConditionType)
    ours = [each for each in old.get("conditions") or () if each.get("type") in types]
    return dict(new) != {**old, "conditions": ours}


def _model(facts: Facts, before: Mapping[str, Any]) -> dict[str, Any] | None:
    for name in sorted(facts.answering):
        answer = facts.view.fresh[name]
        return _given(
            resolvedRevision=answer.model_revision or None,
            parameters=answer.model_parameters or None,
            dtype=answer.model_dtype or None,
        )
    return _carried(facts, before, "model")


def _draft(facts: Facts, before: Mapping[str, Any]) -> dict[str, Any] | None:
    if facts.spec is not None and facts.spec.speculative_decoding.draft is None:
        return None
    for name in sorted(facts.answering):
        answer = facts.view.fresh[name]
        if answer.draft_ok:
            return _given(resolvedRevision=answer.draft_revision or None, parameters=answer.draft_parameters or None)
    return None if facts.broken_drafts else _carried(facts, before, "draft")


def _carried(facts: Facts, before: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What was said of the same spec. After a change of it nothing is, until a pod of the new one answers."""
    same = before.get("observedGeneration") == facts.observed.model.generation
    return dict(before.get(name) or {}) or None if same else None


def _given(**fields: Any) -> dict[str, Any] | None:
    return {name: value for name, value in fields.items() if value is not None} or None


# -- speculation ---------------------------------------------------------------------------------------------------


def _speculation(facts: Facts, before: Mapping[str, Any]) -> dict[str, Any] | None:
    old: Mapping[str, Any] = before.get("speculativeDecoding") or {}
    if facts.plan.policy is None:
        return dict(old) or None
    state, reason = _state(facts, old)
    turned = old.get("state") != state
    return _given(
        state=state,
        reason=reason or None,
        method=str(facts.spec.speculative_decoding.effective_method) if facts.spec else old.get("method"),
        lastTransitionTime=timestamp(facts) if turned else old.get("lastTransitionTime"),
        **_numbers(facts, old, state, turned),
    )


def _state(facts: Facts, old: Mapping[str, Any]) -> tuple[str, str]:
    policy = facts.plan.policy
    if policy is None:
        return str(old.get("state", "")), str(old.get("reason", ""))
    unavailable = str(SpeculationState.UNAVAILABLE)
    # a draft that was broken stays so until a pod says otherwise
    unread = bool(facts.view.ready) and not facts.answering
    if facts.no_draft_works or (old.get("state") == unavailable and unread):
        return unavailable, str(Reason.DRAFT_UNAVAILABLE)
    return str(policy.state), policy.reason


def _numbers(facts: Facts, old: Mapping[str, Any], state: str, turned: bool) -> dict[str, Any]:
    """The measured numbers, or the old ones while the change is not worth a write.

    What cannot be said now, because nothing is generated, stays as last said; without a ready replica nothing is.
    """
    if not facts.view.ready:
        return {}
    new = {name: value for name, value in _measured(facts, state).items() if value is not None}
    kept = {name: old[name] for name in _MATERIAL if name in old}
    if facts.report.answers:
        # these two are the runtimes' own words: silence about them is an answer
        kept = {n: v for n, v in kept.items() if n in new or n not in ("speedup", "breakEvenConcurrency")}
    new = {**kept, **new}
    written = facts.observed.status_written_at
    due = written is None or facts.observed.now - written >= NUMBERS_EVERY
    worth = [name for name in _MATERIAL if _moved(name, old.get(name), new.get(name))]
    appeared = any(name not in old for name in worth)
    if turned or appeared or (due and worth):
        return new
    return {name: old[name] for name in _MATERIAL if name in old}


def _measured(facts: Facts, state: str) -> dict[str, Any]:
    r = facts.report
    tokens, speedup = r.effective_tokens, r.speedup
    if state != SpeculationState.ACTIVE:  # pods are told so, whatever the last minute was like
        tokens, speedup = 0.0, 1.0
    return {
        "effectiveTokens": None if tokens is None else f"{tokens:.1f}",
        "acceptancePercent": None if r.acceptance is None else round(100 * r.acceptance),
        "acceptedLength": None if r.accepted_length is None else f"{r.accepted_length:.1f}",
        "speedup": None if speedup is None else f"{speedup:.2f}",
        "runningConcurrency": None if r.running is None else f"{r.running:.1f}",
        "breakEvenConcurrency": r.break_even,
    }


def _moved(name: str, old: object, new: object) -> bool:
    if old is None or new is None:
        return old is not new
    try:
        before, after = float(str(old)), float(str(new))
    except ValueError:
        return True
    # a tenth of a large number is noise; coming to rest at 0 is not
    step = max(_MATERIAL[name], abs(before) / 10 if name in ("runningConcurrency", "breakEvenConcurrency") else 0)
    return abs(after - before) >= step - 1e-9 or (after == 0) != (before == 0)


# -- autoscaling ---------------------------------------------------------------------------------------------------


def scaling_step(scaling: Scaling | None, wall: datetime) -> dict[str, Any] | None:
    """A planned change of replicas, as `recentDecisions` has it."""
    if scaling is None:
        return None
    return {"time": written(wall), "from": scaling.before, "to": scaling.after, "reason": scaling.reason}


def _autoscaling(facts: Facts, before: Mapping[str, Any]) -> dict[str, Any] | None:
    old: Mapping[str, Any] = before.get("autoscaling") or {}
    if facts.spec is not None and facts.spec.autoscaling is None:
        return None
    decisions = facts.observed.recent_decisions
    made = scaling_step(facts.plan.scaling, facts.observed.wall)
    if made is not None:
        if decisions and all(decisions[-1].get(end) == made[end] for end in ("from", "to")):
            decisions.pop()  # decided again before its effect was seen
        decisions.append(made)
    if not decisions or decisions == old.get("recentDecisions"):
        return dict(old) or None
    return {"lastScaleTime": decisions[-1]["time"], "recentDecisions": decisions[-REMEMBERED:]}
