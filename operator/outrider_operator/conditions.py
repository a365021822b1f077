"""The conditions as JSON: what the judgements say, with times that stay while nothing turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_operator.api.reasons import ConditionType, Reason, Status
from outrider_operator.clock import written
from outrider_operator.facts import Facts
from outrider_operator.judgements.accepted import ACCEPTED
from outrider_operator.judgements.loaded import DRAFT_READY, MODEL_READY
from outrider_operator.judgements.progress import RECONCILING, STALLED
from outrider_operator.judgements.ready import AVAILABLE, READY
from outrider_operator.judgements.scaling import SCALING_ACTIVE
from outrider_operator.judgements.speculation import SPECULATION_ACTIVE
from outrider_operator.judgements.verdict import PENDING, Chain, Verdict

_CHAINS: dict[ConditionType, Chain] = {
    ConditionType.READY: READY,
    ConditionType.ACCEPTED: ACCEPTED,
    ConditionType.MODEL_READY: MODEL_READY,
    ConditionType.DRAFT_READY: DRAFT_READY,
    ConditionType.AVAILABLE: AVAILABLE,
    ConditionType.SCALING_ACTIVE: SCALING_ACTIVE,
    ConditionType.SPECULATION_ACTIVE: SPECULATION_ACTIVE,
    ConditionType.RECONCILING: RECONCILING,
    ConditionType.STALLED: STALLED,
}
_ONLY_WHILE_TRUE = frozenset({ConditionType.RECONCILING, ConditionType.STALLED})
_LONGEST = 32768  # characters, the API's limit; pods, webhooks and the API server may say more


def conditions(facts: Facts) -> list[dict[str, Any]]:
    """All conditions as JSON. A transition time stays while the status does; what no judge can tell yet stays too."""
    before = {c["type"]: c for c in facts.observed.model.status.get("conditions") or () if "type" in c}
    result = []
    for kind, chain in _CHAINS.items():
        previous = before.get(kind, {})
        verdict = next((v for judge in chain if (v := judge(facts)) is not None), None)
        if kind in _ONLY_WHILE_TRUE:
            if verdict is not None:
                result.append(_condition(facts, kind, verdict, previous))
        else:
            result.append(_condition(facts, kind, verdict or _kept(facts, previous), previous))
    return result


def timestamp(facts: Facts) -> str:
    return written(facts.observed.wall)


def _condition(facts: Facts, kind: ConditionType, verdict: Verdict, previous: Mapping[str, Any]) -> dict[str, Any]:
    same = previous.get("status") == verdict.status and previous.get("lastTransitionTime")
    return {
        "type": str(kind),
        "status": str(verdict.status),
        "observedGeneration": facts.observed.model.generation,
        "lastTransitionTime": previous["lastTransitionTime"] if same else timestamp(facts),
        "reason": str(verdict.reason),
        "message": verdict.message[:_LONGEST],
    }


def _kept(facts: Facts, previous: Mapping[str, Any]) -> Verdict:
    """What was said of this same generation, until there is something to judge it by again."""
    if previous.get("observedGeneration") != facts.observed.model.generation:
        return PENDING
    try:
        return Verdict(Status(previous["status"]), Reason(previous["reason"]), str(previous.get("message", "")))
    except (KeyError, ValueError):
        return PENDING
