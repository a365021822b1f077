"""SpeculationActive: whether tokens are drafted now, or who decided that none are."""

from __future__ import annotations

from datetime import UTC, datetime

from outrider_operator.api.reasons import ConditionType, Reason, SpeculationState, Status
from outrider_operator.api.v1alpha1 import Mode
from outrider_operator.clock import written
from outrider_operator.facts import Facts
from outrider_operator.fleet.history import REPORT_WINDOW
from outrider_operator.fleet.policy import Memory, Policy
from outrider_operator.judgements.loaded import without_pods
from outrider_operator.judgements.scaling import unmeasured
from outrider_operator.judgements.verdict import Chain, Verdict, find

DRAFTING = 0.1  # mean tokens per request and step from which tokens are drafted, and below which they no longer are
STILL_DRAFTING = 0.05


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
    if policy.reason == Reason.LOW_ACCEPTANCE:
        return _low_acceptance(policy, memory)
    return _saturated(memory)


def _saturated(memory: Memory) -> Verdict:
    """A threshold that nobody gave was measured, and will be again; see _low_acceptance for the words."""
    message = f"batches are too full for speculation to pay at {memory.disable_at:g} running requests per replica"
    if memory.remeasure_at:
        when = f"now on pod {memory.trial}" if memory.trial else _clock(memory.remeasure_at)
        message += f", as replicas measured it; measured anew {when}"
    return Verdict(Status.FALSE, Reason.SATURATED, message)


def _low_acceptance(policy: Policy, memory: Memory) -> Verdict:
    """What it waits for, in words that stay while it waits: a message that moves is a write each time."""
    tried = "once" if memory.attempts == 1 else f"{memory.attempts} times in a row"
    next_step = f"being tried again on pod {memory.trial}" if memory.trial else f"tried again {_clock(memory.retry_at)}"
    return Verdict(
        Status.FALSE,
        Reason.LOW_ACCEPTANCE,
        f"fewer than {policy.min_acceptance_percent} % of the drafted tokens were accepted ({tried}); {next_step}",
    )


def _clock(seconds: float) -> str:
    return f"at {written(datetime.fromtimestamp(seconds, UTC))}"


def _drafting(facts: Facts) -> Verdict | None:
    """A runtime that sees no gain still probes now and then; and what hovers at the edge must not turn each time."""
    tokens = facts.report.effective_tokens
    before = find(facts.observed.model.status, ConditionType.SPECULATION_ACTIVE).get("reason")
    if tokens is None or tokens < (STILL_DRAFTING if before == Reason.DRAFTING else DRAFTING):
        return None
    return Verdict(Status.TRUE, Reason.DRAFTING, "tokens are drafted and verified")


def _not_drafting(facts: Facts) -> Verdict | None:
    """Nothing drafted, or nothing to draft for: said only once a whole window shows it, unless nothing was before."""
    if not facts.view.ready:
        return Verdict(Status.UNKNOWN, Reason.PENDING, "no replica is ready")
    if not facts.view.measurable or facts.report.running is None:
        return None
    before = find(facts.observed.model.status, ConditionType.SPECULATION_ACTIVE).get("reason")
    if facts.view.window(REPORT_WINDOW) is None and before not in (None, Reason.PENDING, Reason.NO_TRAFFIC):
        return None
    if facts.report.traffic:
        return Verdict(Status.FALSE, Reason.NO_GAIN, "the runtimes draft nothing: plain decoding is faster now")
    return Verdict(Status.UNKNOWN, Reason.NO_TRAFFIC, "no request ran within the last minute")


SPECULATION_ACTIVE: Chain = (
    _disabled,
    without_pods,
    _draft_unavailable,
    unmeasured,  # what suspended it is not looked at again until pods can be measured
    _suspended_by_policy,
    _drafting,
    _not_drafting,
)
