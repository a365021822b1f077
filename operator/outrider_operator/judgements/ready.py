"""Ready and Available: whether the model is served as specified, and whether it is served at all."""

from __future__ import annotations

from outrider_operator.api.reasons import ConditionType, Reason, Status
from outrider_operator.api.v1alpha1 import Mode
from outrider_operator.facts import Facts, is_suspended
from outrider_operator.judgements.accepted import not_applied, refused
from outrider_operator.judgements.verdict import SUSPENDED, Chain, Verdict, find


def _not_accepted(facts: Facts) -> Verdict | None:
    return refused(facts) or not_applied(facts)


def _ready_suspended(facts: Facts) -> Verdict | None:
    if facts.spec is not None and is_suspended(facts.spec):
        return Verdict(Status.TRUE, Reason.SUSPENDED, SUSPENDED)
    return None


def not_created(facts: Facts) -> Verdict | None:
    return None if facts.deployment else Verdict(Status.UNKNOWN, Reason.PENDING, "the Deployment is being created")


def _draft_needed(facts: Facts) -> Verdict | None:
    """mode Enabled promises speculation; without its draft the promise is broken, though the model may serve."""
    if facts.spec is None or facts.spec.speculative_decoding.mode is not Mode.ENABLED:
        return None
    if not facts.broken_drafts:
        return None
    reason, message = facts.broken_drafts[0]
    return Verdict(Status.FALSE, Reason.DRAFT_UNAVAILABLE, f"mode Enabled needs the draft: {reason}: {message}")


def deadline(facts: Facts) -> Verdict | None:
    if not facts.deadline_exceeded:
        return None
    why = f": {facts.failure.reason}: {facts.failure.message}" if facts.failure else ""
    return Verdict(
        Status.FALSE,
        facts.failure.reason if facts.failure else Reason.PROGRESS_DEADLINE_EXCEEDED,
        f"the rollout made no progress within rollout.progressDeadlineSeconds{why}",
    )


def _rolling_out(facts: Facts) -> Verdict | None:
    """A rollout under way, with the failure that holds it up where there is one."""
    if facts.unapplied or (lagging(facts) and not _rescaled(facts)):
        return Verdict(Status.FALSE, Reason.ROLLING_OUT, "the Deployment has yet to take the spec over")
    if not facts.outdated:
        return None
    return failing(facts) or Verdict(Status.FALSE, Reason.ROLLING_OUT, "pods of an earlier template remain")


def lagging(facts: Facts) -> bool:
    """The Deployment's status may be of an earlier spec. After a mere change of replicas it is not: autoscaling must
    not make a ready model look unready for the moment its Deployment takes to notice."""
    ready = find(facts.observed.model.status, ConditionType.READY)
    settled = _was_ready(facts) and ready.get("observedGeneration") == facts.observed.model.generation
    return facts.unobserved and not settled


def _was_ready(facts: Facts) -> bool:
    ready = find(facts.observed.model.status, ConditionType.READY)
    return bool(ready.get("status") == Status.TRUE and ready.get("reason") == Reason.READY)


def _rescaled(facts: Facts) -> bool:
    """Whether all that is new to the Deployment is how many pods of its template there are to be, as by /scale."""
    return _was_ready(facts) and bool(facts.current) and not facts.outdated


def failing(facts: Facts) -> Verdict | None:
    failed = facts.failure
    if failed is None:
        return None
    return Verdict(Status.FALSE, failed.reason, f"pod {failed.pod}: {failed.message}" if failed.pod else failed.message)


def too_few(facts: Facts) -> Verdict | None:
    if facts.counted("availableReplicas") >= facts.needed:
        return None
    failed = failing(facts)
    if failed is not None:
        return failed
    if not any(pod.ready for pod in facts.pods):
        return Verdict(Status.FALSE, Reason.LOADING, "the model is being loaded")
    return Verdict(Status.FALSE, Reason.TOO_FEW_REPLICAS, f"fewer than {facts.needed} replicas are available")


def _ready(facts: Facts) -> Verdict:
    return Verdict(Status.TRUE, Reason.READY, "the model is served")


def without_replicas(facts: Facts) -> Verdict | None:
    if facts.spec is not None and is_suspended(facts.spec):
        return Verdict(Status.FALSE, Reason.SUSPENDED, SUSPENDED)
    return None


def _available(facts: Facts) -> Verdict:
    return Verdict(Status.TRUE, Reason.AVAILABLE, "enough replicas are available")


READY: Chain = (
    _not_accepted,
    _ready_suspended,
    not_created,
    _draft_needed,
    deadline,
    _rolling_out,
    too_few,
    _ready,
)
AVAILABLE: Chain = (without_replicas, not_created, too_few, _available)
