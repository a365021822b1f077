"""ModelReady and DraftReady: whether the weights are loaded, or why they are not."""

from __future__ import annotations

from outrider_operator.api.reasons import Reason, Status
from outrider_operator.facts import Facts, is_suspended
from outrider_operator.judgements.ready import failing
from outrider_operator.judgements.verdict import PENDING, SUSPENDED, Chain, Verdict


def without_pods(facts: Facts) -> Verdict | None:
    if facts.spec is not None and is_suspended(facts.spec):
        return Verdict(Status.UNKNOWN, Reason.SUSPENDED, SUSPENDED)
    return None


def _model_loaded(facts: Facts) -> Verdict | None:
    if any(pod.ready for pod in facts.current):
        return Verdict(Status.TRUE, Reason.LOADED, "the model is loaded")
    return None


def loading(facts: Facts) -> Verdict | None:
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
    return None if any(pod.ready for pod in facts.current) else loading(facts)


MODEL_READY: Chain = (without_pods, _model_loaded, failing, loading)
DRAFT_READY: Chain = (_no_draft, without_pods, _draft_refused, _draft_loaded, _draft_loading)
