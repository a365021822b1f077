"""Accepted: whether the spec can be served as it is written."""

from __future__ import annotations

from outrider_operator.api.reasons import Reason, Status
from outrider_operator.facts import Facts
from outrider_operator.judgements.verdict import Chain, Verdict
from outrider_operator.render.cache import MANY_NODES, access_modes, larger_size, most_replicas


def refused(facts: Facts) -> Verdict | None:
    refusal = facts.plan.refusal
    return Verdict(Status.FALSE, refusal.reason, refusal.message) if refusal else None


def not_applied(facts: Facts) -> Verdict | None:
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
    if spec.cache is None or spec.cache.size is None:
        return found
    child = facts.observed.children.get("PersistentVolumeClaim")
    claim = child.body if child else None
    if larger := larger_size(spec.cache, claim):
        found.append(f"cache.size {spec.cache.size}: the claim has {larger} and cannot shrink")
    if most_replicas(spec) > 1:
        modes = access_modes(claim)
        if modes and MANY_NODES not in modes:
            found.append(
                f"more than one replica shares the cache, but the claim was created {modes[0]}: replicas on other "
                f"nodes cannot start; for {MANY_NODES} delete the claim and the SpeculativeModel and create it again"
            )
        else:
            found.append(f"more than one replica shares the cache: its storage class must offer {MANY_NODES}")
    return found


ACCEPTED: Chain = (refused, not_applied, _accepted)
