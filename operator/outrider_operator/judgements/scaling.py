"""ScalingActive: whether replicas follow the load, and by what."""

from __future__ import annotations

from outrider_operator.api.reasons import ConditionType, Reason, Status
from outrider_operator.api.v1alpha1 import Autoscaling
from outrider_operator.facts import Facts, live_replicas
from outrider_operator.fleet.autoscale import TOLERANCE, load_now
from outrider_operator.judgements.ready import failing, without_replicas
from outrider_operator.judgements.verdict import Chain, Verdict, find

BEYOND = "more requests are in flight than maxReplicas allows for"


def _owned_elsewhere(facts: Facts) -> Verdict | None:
    if not facts.foreign_owner or live_replicas(facts.deployment) is None:
        return None
    return Verdict(
        Status.FALSE,
        Reason.REPLICAS_OWNED_ELSEWHERE,
        f"{facts.foreign_owner} writes the Deployment's replicas; let it scale the SpeculativeModel instead",
    )


def _fixed(facts: Facts) -> Verdict | None:
    if facts.spec is None or facts.spec.autoscaling is not None:
        return None
    return Verdict(Status.FALSE, Reason.FIXED_REPLICAS, "replicas are as given, without autoscaling")


def unmeasured(facts: Facts) -> Verdict | None:
    if not facts.unmeasurable:
        return None
    pod = facts.silent[0]
    said = facts.view.ready[pod][-1].error or "no answer"
    return Verdict(Status.UNKNOWN, Reason.METRICS_UNAVAILABLE, f"most replicas cannot be measured: pod {pod}: {said}")


def _scaling(facts: Facts) -> Verdict | None:
    if facts.plan.scaling is not None:
        return Verdict(Status.TRUE, Reason.SCALING, facts.plan.scaling.reason)
    if not facts.view.ready:
        return Verdict(Status.UNKNOWN, Reason.PENDING, "no replica is ready to be measured")
    if not facts.view.measurable:
        return None
    if len(facts.view.ready) < facts.desired:
        failed = failing(facts)
        return Verdict(Status.TRUE, Reason.SCALING, failed.message if failed else "replicas are starting")
    return None


def _within_target(facts: Facts) -> Verdict | None:
    spec = facts.spec
    if spec is None or spec.autoscaling is None or not facts.view.measurable:
        return None
    scaling = spec.autoscaling
    message = (
        f"{scaling.min_replicas} to {scaling.max_replicas} replicas by {scaling.target_concurrency} requests in flight "
        "each; spec.replicas is ignored"
    )
    if _beyond(facts, scaling):
        message += f"; {BEYOND}"
    return Verdict(Status.TRUE, Reason.WITHIN_TARGET, message)


def _beyond(facts: Facts, scaling: Autoscaling) -> bool:
    """Whether the most replicas there may be are too few. What hovers at the edge must not turn the message each time,
    and what nobody can tell yet stays said."""
    if facts.desired < scaling.max_replicas:
        return False
    before = find(facts.observed.model.status, ConditionType.SCALING_ACTIVE).get("message") or ""
    said, load = before.endswith(BEYOND), load_now(facts.view)
    if load is None:
        return said
    return load > scaling.target_concurrency * scaling.max_replicas * (1 if said else 1 + TOLERANCE)


SCALING_ACTIVE: Chain = (_owned_elsewhere, _fixed, without_replicas, unmeasured, _scaling, _within_target)
