"""Reconciling and Stalled, present only while True (kstatus): about changes of spec and rollouts alone."""

from __future__ import annotations

from outrider_operator.api.reasons import ConditionType, Reason, Status
from outrider_operator.facts import Facts, is_suspended
from outrider_operator.judgements.accepted import refused
from outrider_operator.judgements.ready import deadline, lagging, too_few
from outrider_operator.judgements.verdict import Chain, Verdict, find


def _stalled(facts: Facts) -> Verdict | None:
    refusal = refused(facts)
    if refusal is not None:
        return Verdict(Status.TRUE, refusal.reason, refusal.message)
    if facts.spec is not None and is_suspended(facts.spec):
        return None
    late = deadline(facts)
    return Verdict(Status.TRUE, Reason.PROGRESS_DEADLINE_EXCEEDED, late.message) if late else None


def _reconciling(facts: Facts) -> Verdict | None:
    """A change of spec on its way into the pods. Once begun it lasts until enough replicas serve it."""
    if _stalled(facts) is not None:
        return None
    if not facts.deployment:
        return Verdict(Status.TRUE, Reason.PENDING, "children are being created")
    replacing = Verdict(Status.TRUE, Reason.ROLLING_OUT, "pods are being replaced")
    idle = facts.spec is None or is_suspended(facts.spec)
    if facts.outdated or (facts.unapplied and not idle):
        return replacing
    if idle:
        return None
    before = find(facts.observed.model.status, ConditionType.RECONCILING).get("reason")
    if not lagging(facts) and (before is None or too_few(facts) is None):
        return None
    if before == Reason.ROLLING_OUT:
        return replacing
    return Verdict(Status.TRUE, Reason.LOADING, "replicas are starting")


STALLED: Chain = (_stalled,)
RECONCILING: Chain = (_reconciling,)
