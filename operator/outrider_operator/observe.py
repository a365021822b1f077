"""What is: one value with everything a decision may look at. Nothing in here asks, waits or writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from outrider_operator.api.v1alpha1 import SpeculativeModelSpec
from outrider_operator.fleet.autoscale import REMEMBERED
from outrider_operator.fleet.samples import Fleet
from outrider_operator.fleet.windows import View


@dataclass(frozen=True, slots=True)
class Model:
    """A SpeculativeModel as last seen. `spec` is None when it does not parse, and `refusal` says why."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: SpeculativeModelSpec | None
    refusal: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class Child:
    """An object that the model owns. `body` holds what decisions read: metadata, spec, status, data."""

    kind: str
    name: str
    hash: str  # annotation outrider.dev/hash: of the object as we rendered it
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the model, reduced to what explains it."""

    name: str
    ip: str
    template: str  # label outrider.dev/template
    ready: bool
    deleting: bool
    phase: str
    unschedulable: str = ""  # message of PodScheduled=False
    waiting_reason: str = ""  # of the container, or of an init container: ImagePullBackOff, CrashLoopBackOff, …
    waiting_message: str = ""
    exit_code: int | None = None  # of the last termination
    termination_reason: str = ""  # OOMKilled, Error, …
    termination_message: str = ""  # /dev/termination-log
    restarts: int = 0
    created: str = ""  # as the API server writes times, which sort as strings


@dataclass(frozen=True)
class Observed:
    model: Model
    children: Mapping[str, Child]  # by kind
    pods: tuple[Pod, ...]
    fleet: Fleet
    now: float  # monotonic seconds, the clock of the samples
    wall: datetime  # UTC, for what is written into status
    conflicts: tuple[str, ...] = ()  # names we need that somebody else owns: "Service llama (owned by …)"
    apply_error: str = ""  # why the last apply failed, until one succeeds
    status_written_at: float | None = None  # monotonic seconds; None when this process wrote none yet
    replicas_writer: str = ""  # who else wrote the Deployment's replicas within the last minute
    untold: tuple[Mapping[str, Any], ...] = ()  # steps of autoscaling that no status could be written of yet

    @cached_property
    def view(self) -> View:
        """The measurements of the pods that are ready; made once, for it is most of the work of a look."""
        ready = sorted(pod.name for pod in self.pods if pod.ready and not pod.deleting)
        return View.of(self.fleet, ready, self.now)

    @property
    def recent_decisions(self) -> list[Mapping[str, Any]]:
        """The last steps of autoscaling as status has them, oldest first, whether or not it tells of all of them."""
        told = (self.model.status.get("autoscaling") or {}).get("recentDecisions") or []
        return [*told, *(step for step in self.untold if step not in told)][-REMEMBERED:]

    @property
    def deployment(self) -> Mapping[str, Any] | None:
        child = self.children.get("Deployment")
        return child.body if child else None
