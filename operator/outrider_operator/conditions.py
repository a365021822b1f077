"""The conditions: for each a chain of small judgements, the first that has something to say wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider_operator.api.reasons import ConditionType, Reason, SpeculationState, Status
from outrider_operator.api.v1alpha1 import Mode
from outrider_operator.facts import Facts, is_suspended, live_replicas
from outrider_operator.fleet.history import REPORT_WINDOW
from outrider_operator.render.cache import MANY_NODES, access_modes, most_replicas


@dataclass(frozen=True, slots=True)
class Verdict:
    status: Status
    reason: Reason
    message: str


Judge = Callable[[Facts], Verdict | None]

PENDING = Verdict(Status.UNKNOWN, Reason.PENDING, "not observed yet")
_SUSPENDED = "no replicas are asked for"


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


def find(status: Mapping[str, Any], kind: ConditionType) -> Mapping[str, Any]:
    """The condition of that type in a status; empty when there is none."""
    return next((c for c in status.get("conditions") or () if c.get("type") == kind), {})


def timestamp(facts: Facts) -> str:
    return facts.observed.wall.strftime("%Y-%m-%dT%H:%M:%SZ")


def _condition(facts: Facts, kind: ConditionType, verdict: Verdict, previous: Mapping[str, Any]) -> dict[str, Any]:
    same = previous.get("status") == verdict.status and previous.get("lastTransitionTime")
    return {
        "type": str(kind),
        "status": str(verdict.status),
        "observedGeneration": facts.observed.model.generation,
        "lastTransitionTime": previous["lastTransitionTime"] if same else timestamp(facts),
        "reason": str(verdict.reason),
        "message": verdict.message,
    }


def _kept(facts: Facts, previous: Mapping[str, Any]) -> Verdict:
    """What was said of this same generation, until there is something to judge it by again."""
    if previous.get("observedGeneration") != facts.observed.model.generation:
        return PENDING
    try:
        return Verdict(Status(previous["status"]), Reason(previous["reason"]), str(previous.get("message", "")))
    except (KeyError, ValueError):
        return PENDING


# -- Accepted ------------------------------------------------------------------------------------------------------


def _refused(facts: Facts) -> Verdict | None:
    refusal = facts.plan.refusal
    return Verdict(Status.FALSE, refusal.reason, refusal.message) if refusal else None


def _not_applied(facts: Facts) -> Verdict | None:
    error = facts.observed.apply_error
    return Verdict(Status.FALSE, Reason.APPLY_FAILED, error) if error else None


def _accepted(facts: Facts) -> Verdict:
    return Verdict(Status.TRUE, Reason.ACCEPTED, "; ".join(_warnings(facts)) or "the spec is being served")


def _warnings(facts: Facts) -> list[str]:
    """What is accepted and yet may not be what the user wants."""
    spec, found = facts.spec, []
    if spec is None:
        return []
    disable_at = spec.speculative_decoding.saturation.disable_at_concurrency
    target = spec.autoscaling.target_concurrency if spec.autoscaling else None
    if disable_at is not None and target is not None and target >= disable_at:
        found.append(
            f"autoscaling.targetConcurrency {target} is not below saturation.disableAtConcurrency {disable_at}: "
            "at its target the fleet decodes plainly"
        )
    if spec.cache is not None and spec.cache.size is not None and most_replicas(spec) > 1:
        claim = facts.observed.children.get("PersistentVolumeClaim")
        modes = access_modes(claim.body if claim else None)
        if modes and MANY_NODES not in modes:
            found.append(
                f"more than one replica shares the cache, but the claim was created {modes[0]}: replicas on other "
                f"nodes cannot start; for {MANY_NODES} delete the claim and the SpeculativeModel and create it again"
            )
        else:
            found.append(f"more than one replica shares the cache: its storage class must offer {MANY_NODES}")
    return found


# -- Ready ---------------------------------------------------------------------------------------------------------


def _not_accepted(facts: Facts) -> Verdict | None:
    return _refused(facts) or _not_applied(facts)


def _ready_suspended(facts: Facts) -> Verdict | None:
    if facts.spec is not None and is_suspended(facts.spec):
        return Verdict(Status.TRUE, Reason.SUSPENDED, _SUSPENDED)
    return None


def _not_created(facts: Facts) -> Verdict | None:
    return None if facts.deployment else Verdict(Status.UNKNOWN, Reason.PENDING, "the Deployment is being created")


def _draft_needed(facts: Facts) -> Verdict | None:
    """mode Enabled promises speculation; without its draft the promise is broken, though the model may serve."""
    if facts.spec is None or facts.spec.speculative_decoding.mode is not Mode.ENABLED:
        return None
    if not facts.broken_drafts:
        return None
    reason, message = facts.broken_drafts[0]
    return Verdict(Status.FALSE, Reason.DRAFT_UNAVAILABLE, f"mode Enabled needs the draft: {reason}: {message}")


def _deadline(facts: Facts) -> Verdict | None:
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
    if facts.unapplied or _lagging(facts):
        return Verdict(Status.FALSE, Reason.ROLLING_OUT, "the Deployment has yet to take the spec over")
    if not facts.outdated:
        return None
    return _failing(facts) or Verdict(Status.FALSE, Reason.ROLLING_OUT, "pods of an earlier template remain")


def _lagging(facts: Facts) -> bool:
    """The Deployment's status may be of an earlier spec. After a mere change of replicas it is not: autoscaling must
    not make a ready model look unready for the moment its Deployment takes to notice."""
    ready = find(facts.observed.model.status, ConditionType.READY)
    was_ready = ready.get("status") == Status.TRUE and ready.get("reason") == Reason.READY
    settled = was_ready and ready.get("observedGeneration") == facts.observed.model.generation
    return facts.unobserved and not settled


def _failing(facts: Facts) -> Verdict | None:
    failed = facts.failure
    return Verdict(Status.FALSE, failed.reason, f"pod {failed.pod}: {failed.message}") if failed else None


def _too_few(facts: Facts) -> Verdict | None:
    if facts.counted("availableReplicas") >= facts.needed:
        return None
    failing = _failing(facts)
    if failing is not None:
        return failing
    if not any(pod.ready for pod in facts.pods):
        return Verdict(Status.FALSE, Reason.LOADING, "the model is being loaded")
    return Verdict(Status.FALSE, Reason.TOO_FEW_REPLICAS, f"fewer than {facts.needed} replicas are available")


def _ready(facts: Facts) -> Verdict:
    return Verdict(Status.TRUE, Reason.READY, "the model is served")


# -- Available -----------------------------------------------------------------------------------------------------


def _unavailable_suspended(facts: Facts) -> Verdict | None:
    if facts.spec is not None and is_suspended(facts.spec):
        return Verdict(Status.FALSE, Reason.SUSPENDED, _SUSPENDED)
    return None


def _available(facts: Facts) -> Verdict:
    return Verdict(Status.TRUE, Reason.AVAILABLE, "enough replicas are available")


# -- ModelReady, DraftReady ----------------------------------------------------------------------------------------


def _no_pods_wanted(facts: Facts) -> Verdict | None:
    if facts.spec is not None and is_suspended(facts.spec):
        return Verdict(Status.UNKNOWN, Reason.SUSPENDED, _SUSPENDED)
    return None


def _model_loaded(facts: Facts) -> Verdict | None:
    if any(pod.ready for pod in facts.current):
        return Verdict(Status.TRUE, Reason.LOADED, "the model is loaded")
    return None


def _loading(facts: Facts) -> Verdict | None:
    return Verdict(Status.UNKNOWN, Reason.LOADING, "no pod has loaded it yet") if facts.deployment else PENDING


def _no_draft(facts: Facts) -> Verdict | None:
    if facts.spec is not None and facts.spec.speculative_decoding.draft is None:
        return Verdict(Status.TRUE, Reason.NOT_REQUIRED, "the method needs no draft model")
    return None


def _draft_refused(facts: Facts) -> Verdict | None:
    if facts.broken_drafts:
        reason, message = facts.broken_drafts[0]
        known = Reason(reason) if reason in set(Reason) else Reason.DRAFT_UNAVAILABLE
        return Verdict(Status.FALSE, known, message or reason)
    failed = facts.failure
    if failed is not None and failed.reason in (Reason.DRAFT_UNAVAILABLE, Reason.TOKENIZER_MISMATCH):
        return Verdict(Status.FALSE, failed.reason, failed.message)
    return None


def _draft_loaded(facts: Facts) -> Verdict | None:
    return Verdict(Status.TRUE, Reason.LOADED, "the draft is loaded") if facts.answering else None


def _draft_loading(facts: Facts) -> Verdict | None:
    """While pods are ready but were not asked yet, what was said of them stays."""
    return None if any(pod.ready for pod in facts.current) else _loading(facts)


# -- ScalingActive -------------------------------------------------------------------------------------------------


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


def _scaling_suspended(facts: Facts) -> Verdict | None:
    return _unavailable_suspended(facts)


def _unmeasured(facts: Facts) -> Verdict | None:
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
        failing = _failing(facts)
        return Verdict(Status.TRUE, Reason.SCALING, failing.message if failing else "replicas are starting")
    return None


def _within_target(facts: Facts) -> Verdict | None:
    spec = facts.spec
    if spec is None or spec.autoscaling is None or not facts.view.measurable:
        return None
    scaling = spec.autoscaling
    return Verdict(
        Status.TRUE,
        Reason.WITHIN_TARGET,
        f"{scaling.min_replicas} to {scaling.max_replicas} replicas by {scaling.target_concurrency} requests in flight "
        "each; spec.replicas is ignored",
    )


# -- SpeculationActive ---------------------------------------------------------------------------------------------


def _disabled(facts: Facts) -> Verdict | None:
    if facts.spec is None or facts.spec.speculative_decoding.mode is not Mode.DISABLED:
        return None
    return Verdict(Status.FALSE, Reason.DISABLED_BY_SPEC, "speculativeDecoding.mode is Disabled")


def _draft_unavailable(facts: Facts) -> Verdict | None:
    if not facts.no_draft_works:
        return None
    reason, message = facts.broken_drafts[0]
    return Verdict(Status.FALSE, Reason.DRAFT_UNAVAILABLE, f"decoding plainly: {reason}: {message}")


def _suspended_by_policy(facts: Facts) -> Verdict | None:
    policy, memory = facts.plan.policy, facts.plan.memory
    if policy is None or policy.state is not SpeculationState.SUSPENDED:
        return None
    if policy.reason == Reason.SATURATED:
        at = f" at {memory.disable_at:g} running requests per replica" if memory.disable_at else ""
        return Verdict(Status.FALSE, Reason.SATURATED, f"batches are too full for speculation to pay{at}")
    return Verdict(Status.FALSE, Reason(policy.reason), "suspended by policy")


def _drafting(facts: Facts) -> Verdict | None:
    tokens = facts.report.effective_tokens
    if tokens is None or tokens <= 0:
        return None
    return Verdict(Status.TRUE, Reason.DRAFTING, "tokens are drafted and verified")


def _not_drafting(facts: Facts) -> Verdict | None:
    """Nothing drafted, or nothing to draft for: said only once a whole window shows it, or nothing was said before."""
    if not facts.view.ready:
        return Verdict(Status.UNKNOWN, Reason.PENDING, "no replica is ready")
    if not facts.view.measurable or facts.report.running is None:
        return None
    before = find(facts.observed.model.status, ConditionType.SPECULATION_ACTIVE).get("reason")
    if facts.view.window(REPORT_WINDOW) is None and before not in (None, Reason.PENDING):
        return None
    if facts.report.traffic:
        return Verdict(Status.FALSE, Reason.NO_GAIN, "the runtimes draft nothing: plain decoding is faster now")
    return Verdict(Status.UNKNOWN, Reason.NO_TRAFFIC, "no request ran within the last minute")


# -- Reconciling, Stalled ------------------------------------------------------------------------------------------


def _stalled(facts: Facts) -> Verdict | None:
    refused = _refused(facts)
    if refused is not None:
        return Verdict(Status.TRUE, refused.reason, refused.message)
    if facts.spec is not None and is_suspended(facts.spec):
        return None
    late = _deadline(facts)
    return Verdict(Status.TRUE, Reason.PROGRESS_DEADLINE_EXCEEDED, late.message) if late else None


def _reconciling(facts: Facts) -> Verdict | None:
    """A change of spec on its way into the pods. Once begun it lasts until enough replicas serve it."""
    if _stalled(facts) is not None:
        return None
    if not facts.deployment:
        return Verdict(Status.TRUE, Reason.PENDING, "children are being created")
    replacing = Verdict(Status.TRUE, Reason.ROLLING_OUT, "pods are being replaced")
    if facts.unapplied or facts.outdated:
        return replacing
    if facts.spec is None or is_suspended(facts.spec):
        return None
    before = find(facts.observed.model.status, ConditionType.RECONCILING).get("reason")
    if not _lagging(facts) and (before is None or _too_few(facts) is None):
        return None
    if before == Reason.ROLLING_OUT:
        return replacing
    return Verdict(Status.TRUE, Reason.LOADING, "replicas are starting")


_CHAINS: dict[ConditionType, tuple[Judge, ...]] = {
    ConditionType.READY: (
        _not_accepted,
        _ready_suspended,
        _not_created,
        _draft_needed,
        _deadline,
        _rolling_out,
        _too_few,
        _ready,
    ),
    ConditionType.ACCEPTED: (_refused, _not_applied, _accepted),
    ConditionType.MODEL_READY: (_no_pods_wanted, _model_loaded, _failing, _loading),
    ConditionType.DRAFT_READY: (_no_draft, _no_pods_wanted, _draft_refused, _draft_loaded, _draft_loading),
    ConditionType.AVAILABLE: (_unavailable_suspended, _not_created, _too_few, _available),
    ConditionType.SCALING_ACTIVE: (
        _owned_elsewhere,
        _fixed,
        _scaling_suspended,
        _unmeasured,
        _scaling,
        _within_target,
    ),
    ConditionType.SPECULATION_ACTIVE: (
        _disabled,
        _no_pods_wanted,
        _draft_unavailable,
        _suspended_by_policy,
        _unmeasured,
        _drafting,
        _not_drafting,
    ),
    ConditionType.RECONCILING: (_reconciling,),
    ConditionType.STALLED: (_stalled,),
}
_ONLY_WHILE_TRUE = frozenset({ConditionType.RECONCILING, ConditionType.STALLED})
