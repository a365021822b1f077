"""Events: one for each transition between the last status and this one, so that repeating a step repeats none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outrider_operator.api.reasons import ConditionType, EventReason, Reason, SpeculationState, Status
from outrider_operator.failures import FAILURES
from outrider_operator.judgements.verdict import find

StatusObject = Mapping[str, Any]
Said = tuple[EventReason, str]


def transitions(old: StatusObject, new: StatusObject) -> list[Said]:
    """Reason and message of each event, in the order things happen."""
    return [said for told in _TOLD if (said := told(old, new)) is not None]


def _refused(old: StatusObject, new: StatusObject) -> Said | None:
    return _became(old, new, ConditionType.ACCEPTED, Status.FALSE, EventReason.REFUSED)


def _rollout_started(old: StatusObject, new: StatusObject) -> Said | None:
    if _rolling(new) and not _rolling(old):
        return EventReason.ROLLOUT_STARTED, "pods are being replaced"
    return None


def _rollout_complete(old: StatusObject, new: StatusObject) -> Said | None:
    if _rolling(old) and not _rolling(new) and _is(new, ConditionType.READY, Status.TRUE):
        return EventReason.ROLLOUT_COMPLETE, "all pods are of the current template"
    return None


def _model_loaded(old: StatusObject, new: StatusObject) -> Said | None:
    return _became(old, new, ConditionType.MODEL_READY, Status.TRUE, EventReason.MODEL_LOADED)


def _draft_rejected(old: StatusObject, new: StatusObject) -> Said | None:
    return _became(old, new, ConditionType.DRAFT_READY, Status.FALSE, EventReason.DRAFT_REJECTED)


def _pod_failed(old: StatusObject, new: StatusObject) -> Said | None:
    if _is(new, ConditionType.ACCEPTED, Status.FALSE):
        return None  # its reason is the spec's, whatever word pods have for the same
    known = {find(old, kind).get("reason") for kind in _SHOWING_FAILURES}
    for kind in _SHOWING_FAILURES:
        condition = find(new, kind)
        if condition.get("reason") in FAILURES and condition["reason"] not in known:
            return EventReason.POD_FAILED, f"{condition['reason']}: {condition['message']}"
    return None


def _speculation_suspended(old: StatusObject, new: StatusObject) -> Said | None:
    if (_state(old), _state(new)) != (SpeculationState.ACTIVE, SpeculationState.SUSPENDED):
        return None
    condition, reason = find(new, ConditionType.SPECULATION_ACTIVE), new["speculativeDecoding"].get("reason")
    # told late, the condition may be about something else by now, such as pods that fell silent
    words = condition.get("message") if condition.get("reason") == reason else "decided before it could be told"
    return EventReason.SPECULATION_SUSPENDED, f"{reason}: {words}"


def _speculation_resumed(old: StatusObject, new: StatusObject) -> Said | None:
    if (_state(old), _state(new)) != (SpeculationState.SUSPENDED, SpeculationState.ACTIVE):
        return None
    return EventReason.SPECULATION_RESUMED, "tokens are drafted again"


def _became(
    old: StatusObject, new: StatusObject, kind: ConditionType, status: Status, event: EventReason
) -> Said | None:
    if not _is(new, kind, status):
        return None
    condition, before = find(new, kind), find(old, kind)
    same_reason = before.get("reason") == condition.get("reason") or status is Status.TRUE
    if before.get("status") == status and same_reason:
        return None
    return event, f"{condition.get('reason')}: {condition.get('message')}"


def _is(status: StatusObject, kind: ConditionType, value: Status) -> bool:
    return bool(find(status, kind).get("status") == value)


def _rolling(status: StatusObject) -> bool:
    return find(status, ConditionType.RECONCILING).get("reason") == Reason.ROLLING_OUT


def _state(status: StatusObject) -> str:
    return str((status.get("speculativeDecoding") or {}).get("state", ""))


_SHOWING_FAILURES = (ConditionType.READY, ConditionType.MODEL_READY, ConditionType.AVAILABLE)
_TOLD: tuple[Callable[[StatusObject, StatusObject], Said | None], ...] = (
    _refused,
    _rollout_started,
    _draft_rejected,
    _model_loaded,
    _rollout_complete,
    _pod_failed,
    _speculation_suspended,
    _speculation_resumed,
)
