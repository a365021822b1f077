"""What to do about it: from what is observed to the children, the policy and the decisions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider_operator.api.reasons import EventReason
from outrider_operator.errors import Refused
from outrider_operator.fleet.policy import Memory, Policy


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
    memory: Memory = Memory()
    scaling: Scaling | None = None
    events: tuple[Event, ...] = ()
    refusal: Refused | None = None
    look_again: float | None = None  # seconds
