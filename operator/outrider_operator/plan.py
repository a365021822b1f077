"""What to do about it: from what is observed to the children, the policy and the decisions. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from outrider_operator.api.reasons import EventReason, Reason, SpeculationState
from outrider_operator.api.v1alpha1 import Mode, SpeculativeModelSpec
from outrider_operator.errors import NameConflict, Refused
from outrider_operator.facts import VOLUME, awaiting_volume, current_pods, is_suspended, live_replicas
from outrider_operator.fleet import autoscale, saturation
from outrider_operator.fleet.autoscale import Past, Situation
from outrider_operator.fleet.history import LOAD_WINDOW
from outrider_operator.fleet.policy import Memory, Policy
from outrider_operator.fleet.windows import View
from outrider_operator.observe import Observed
from outrider_operator.render.cache import cache_claim
from outrider_operator.render.deployment import deployment, recorded
from outrider_operator.render.disruption import disruption_budget
from outrider_operator.render.meta import sealed
from outrider_operator.render.network import network_policy
from outrider_operator.render.policy import policy_config_map, remembered
from outrider_operator.render.service import service
from outrider_operator.status import status
from outrider_operator.transitions import transitions


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the operator's settings decide for every model."""

    runtime_image: str
    network_policy: bool = False  # whether each model gets a NetworkPolicy
    operator_namespace: str = "outrider-system"  # these two reach the admin port through it
    monitoring_namespace: str = "monitoring"


@dataclass(frozen=True, slots=True)
class Event:
    """One transition, said once."""

    reason: EventReason
    message: str


@dataclass(frozen=True, slots=True)
class Scaling:
    """A change of replicas and why, for status and log."""

    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`children` are applied in order, after Secret NAME-admin exists; owned children of a kind in `prune` go.

    With a `refusal` nothing is applied and what runs keeps running.
    """

    children: tuple[Mapping[str, Any], ...] = ()
    prune: tuple[tuple[str, str], ...] = ()  # (kind, name)
    policy: Policy | None = None
    trial: Policy | None = None  # what pod `memory.trial` is told instead
    memory: Memory = field(default_factory=Memory)
    scaling: Scaling | None = None
    events: tuple[Event, ...] = ()
    refusal: Refused | None = None
    look_again: float | None = None  # in so many seconds: time alone makes a difference

    def policy_of(self, pod: str) -> Policy | None:
        """What that pod is to be told."""
        return self.trial if self.trial and pod == self.memory.trial else self.policy

    @property
    def unscaled(self) -> Plan:
        """The same where the change of replicas could not be carried out: it will be decided again."""
        events = tuple(e for e in self.events if e.reason not in (EventReason.SCALED_UP, EventReason.SCALED_DOWN))
        return replace(self, scaling=None, events=events)


def plan(observed: Observed, defaults: Defaults) -> Plan:
    """The plan for one model. Planning again on what the plan brought about changes nothing."""
    if observed.model.deleting:
        return Plan()  # garbage collection takes the children; applying them again would only get in its way
    decided = _decided(observed, defaults)
    told = transitions(observed.model.status, status(observed, decided))
    events = (*(Event(reason, message) for reason, message in told), *decided.events)
    look_again = VOLUME.total_seconds() + 1 if awaiting_volume(observed) else None
    return replace(decided, events=events, look_again=look_again)


def _decided(observed: Observed, defaults: Defaults) -> Plan:
    refusal = next((r for judge in _REFUSALS if (r := judge(observed)) is not None), None)
    spec = observed.model.spec
    if refusal is not None or spec is None:
        return Plan(refusal=refusal)
    view, past = observed.view, _past(observed)
    config_map = observed.children.get("ConfigMap")
    before = remembered(config_map.body if config_map else None)
    at = float(int(observed.wall.timestamp()))
    scaling_out = _scaling_out(observed, spec, view, past)
    situation = saturation.Situation(spec, view, at, scaling_out, current_pods(observed))
    memory = saturation.decide(before, situation)
    policy = saturation.policy(memory, spec.speculative_decoding)
    replicas, scaling = _replicas(observed, spec, view, past, before, memory)
    try:
        children = _children(observed, spec, defaults, replicas, policy, memory)
    except Refused as error:
        return Plan(refusal=error)
    return Plan(
        children=children,
        prune=_leftovers(observed, children),
        policy=policy,
        trial=saturation.trial(spec.speculative_decoding) if memory.trial else None,
        memory=memory,
        scaling=scaling,
        events=_scaled(scaling),
    )


# -- refusals ------------------------------------------------------------------------------------------------------


def _invalid(observed: Observed) -> Refused | None:
    model = observed.model
    return None if model.spec else Refused(Reason.INVALID_SPEC, model.refusal or "the spec does not parse")


def _conflict(observed: Observed) -> Refused | None:
    if not observed.conflicts:
        return None
    return NameConflict(
        f"{', '.join(observed.conflicts)}: needed by this model and never taken over; "
        "delete it or give the SpeculativeModel another name"
    )


def _unsupported_parallelism(observed: Observed) -> Refused | None:
    size = observed.model.spec.engine.tensor_parallel_size if observed.model.spec else 1
    if size == 1:
        return None
    return Refused(
        Reason.UNSUPPORTED_PARALLELISM, f"engine.tensorParallelSize {size}: only 1 is supported; set it to 1"
    )


_REFUSALS: tuple[Callable[[Observed], Refused | None], ...] = (_invalid, _conflict, _unsupported_parallelism)


# -- decisions -----------------------------------------------------------------------------------------------------


def _scaling_out(observed: Observed, spec: SpeculativeModelSpec, view: View, past: list[Past]) -> bool:
    if spec.autoscaling is None:
        return False
    target, desired = spec.autoscaling.target_concurrency, live_replicas(observed.deployment) or 0
    return autoscale.scale_out_in_progress(view, target, desired, past, observed.wall)


def _replicas(
    observed: Observed, spec: SpeculativeModelSpec, view: View, past: list[Past], before: Memory, memory: Memory
) -> tuple[int, Scaling | None]:
    """Replicas from now on, and the decision that changed them. This is the one place that decides them."""
    live = live_replicas(observed.deployment)
    if is_suspended(spec):
        return 0, None
    if spec.autoscaling is None:
        return spec.replicas, None
    if not live:  # created, or resumed
        return spec.autoscaling.min_replicas, None
    decision = autoscale.decide(
        Situation(
            autoscaling=spec.autoscaling,
            current=live,
            view=view,
            past=past,
            at=observed.wall,
            disable_at=_saturates_at(spec, memory, view),
            hold_scale_out=_suspends_first(spec, before, memory, view, observed.wall.timestamp()),
        )
    )
    if decision.replicas == live:
        return live, None
    return decision.replicas, Scaling(live, decision.replicas, decision.reason)


def _saturates_at(spec: SpeculativeModelSpec, memory: Memory, view: View) -> float | None:
    """The threshold that scaling in must stay clear of; none where load suspends nothing, or already has."""
    speculation = spec.speculative_decoding
    if speculation.mode is not Mode.AUTO or memory.state is not SpeculationState.ACTIVE:
        return None
    return saturation.disable_at(memory, speculation.saturation, view)


def _suspends_first(spec: SpeculativeModelSpec, before: Memory, memory: Memory, view: View, at: float) -> bool:
    """At saturation speculation is suspended first: it is free, works at once, and may be enough."""
    if memory.state is SpeculationState.SUSPENDED:
        return before.state is SpeculationState.ACTIVE
    return saturation.saturating(memory, spec.speculative_decoding, view, LOAD_WINDOW, at)


def _past(observed: Observed) -> list[Past]:
    """Earlier decisions. What does not parse was not written by us and is left out."""
    found = []
    for entry in observed.recent_decisions:
        try:
            at = datetime.fromisoformat(str(entry["time"]))
            past = Past(at, int(entry["from"]), int(entry["to"]))
        except (KeyError, TypeError, ValueError):
            continue
        if at.tzinfo is not None:
            found.append(past)
    return found


def _scaled(scaling: Scaling | None) -> tuple[Event, ...]:
    if scaling is None:
        return ()
    reason = EventReason.SCALED_UP if scaling.after > scaling.before else EventReason.SCALED_DOWN
    return (Event(reason, f"from {scaling.before} to {scaling.after} replicas: {scaling.reason}"),)


# -- children ------------------------------------------------------------------------------------------------------


def _children(
    observed: Observed,
    spec: SpeculativeModelSpec,
    defaults: Defaults,
    replicas: int,
    policy: Policy,
    memory: Memory,
) -> tuple[Mapping[str, Any], ...]:
    """In the order they are applied: what pods need before the pods, what lets others reach them after."""
    model = observed.model
    children = [policy_config_map(model, policy, memory)]
    if spec.cache is not None and spec.cache.size is not None:
        claim = observed.children.get("PersistentVolumeClaim")
        children.append(cache_claim(model, spec, spec.cache, claim.body if claim else None))
    made_with = recorded(model, spec, observed.deployment, defaults.runtime_image)
    children.append(deployment(model, spec, replicas, made_with))
    children.append(service(model))
    children.append(disruption_budget(model))
    if defaults.network_policy:
        admins = (defaults.operator_namespace, defaults.monitoring_namespace)
        children.append(network_policy(model, admins))
    return tuple(sealed(child) for child in children)


# kinds that may be there and no longer be wanted; a claim holds data and is never removed
_PRUNED = ("NetworkPolicy",)


def _leftovers(observed: Observed, children: tuple[Mapping[str, Any], ...]) -> tuple[tuple[str, str], ...]:
    wanted = {child["kind"] for child in children}
    unwanted = (kind for kind in _PRUNED if kind not in wanted and kind in observed.children)
    return tuple((kind, observed.children[kind].name) for kind in unwanted)
