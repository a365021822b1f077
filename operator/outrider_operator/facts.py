"""What conditions and status are judged by: observed and planned once more, as the few facts they ask about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outrider_operator import labels
from outrider_operator.api.reasons import Reason
from outrider_operator.api.v1alpha1 import SpeculativeModelSpec
from outrider_operator.clock import written
from outrider_operator.failures import Failure, awaits_volume, failure, turned_away
from outrider_operator.fleet.report import Report, report
from outrider_operator.fleet.windows import STALE, View
from outrider_operator.observe import Observed, Pod
from outrider_operator.render.deployment import rollout_steps, template_hash

if TYPE_CHECKING:
    from outrider_operator.plan import Plan

_RECENT = timedelta(minutes=5)  # pods that ended earlier explain nothing any more
VOLUME = timedelta(seconds=15)  # in which the volume of a new claim is usually there


def current_pods(observed: Observed) -> frozenset[str]:
    """The ready pods of the template that the Deployment has now."""
    template = template_hash(observed.deployment or {})
    return frozenset(p.name for p in observed.pods if p.ready and not p.deleting and p.template == template)


def awaiting_volume(observed: Observed) -> frozenset[str]:
    """Pods that are too new for their claim's missing volume to be a failure."""
    since = written(observed.wall - VOLUME)
    return frozenset(pod.name for pod in observed.pods if awaits_volume(pod, since))


def is_suspended(spec: SpeculativeModelSpec) -> bool:
    """Whether the user asks for no replicas at all."""
    return spec.suspend or (spec.autoscaling is None and spec.replicas == 0)


def live_replicas(deployment: Mapping[str, Any] | None) -> int | None:
    replicas = (deployment or {}).get("spec", {}).get("replicas")
    return None if replicas is None else int(replicas)


def foreign_writer(deployment: Mapping[str, Any] | None) -> str:
    """Who else owns the Deployment's replicas as it is; empty when nobody does."""
    for entry in (deployment or {}).get("metadata", {}).get("managedFields") or ():
        if entry.get("manager") in (labels.FIELD_MANAGER, labels.REPAIR_MANAGER):
            continue
        if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {}):
            return str(entry.get("manager") or "somebody")
    return ""


@dataclass(frozen=True)
class Facts:
    """Computed once each: a status asks for some of them several times."""

    observed: Observed
    plan: Plan

    @property
    def spec(self) -> SpeculativeModelSpec | None:
        return self.observed.model.spec

    @property
    def deployment(self) -> Mapping[str, Any]:
        """The live Deployment; empty when there is none."""
        return self.observed.deployment or {}

    @cached_property
    def planned(self) -> Mapping[str, Any]:
        """The Deployment as planned; where nothing is planned, as it is."""
        found = (child for child in self.plan.children if child["kind"] == "Deployment")
        return next(found, self.deployment)

    @property
    def view(self) -> View:
        return self.observed.view

    @cached_property
    def report(self) -> Report:
        return report(self.view)

    # -- replicas

    @property
    def desired(self) -> int:
        return live_replicas(self.planned) or 0

    @property
    def floor(self) -> int:
        """Replicas the user counts on: what autoscaling adds beyond them never decides readiness."""
        spec = self.spec
        if spec is None:
            return self.desired
        return spec.autoscaling.min_replicas if spec.autoscaling else spec.replicas

    @property
    def needed(self) -> int:
        if self.spec is None:
            return max(1, self.floor)
        return max(1, self.floor - _count(rollout_steps(self.spec)[1], self.floor))

    def counted(self, name: str) -> int:
        """A number of the live Deployment's status."""
        return int(self.deployment.get("status", {}).get(name) or 0)

    # -- pods

    @cached_property
    def pods(self) -> tuple[Pod, ...]:
        """Those that stay. A leaving pod takes no new requests and explains nothing any more."""
        return tuple(p for p in self.observed.pods if not p.deleting and p.phase not in ("Failed", "Succeeded"))

    @cached_property
    def current(self) -> tuple[Pod, ...]:
        template = template_hash(self.planned)
        return tuple(pod for pod in self.pods if pod.template == template)

    @property
    def outdated(self) -> int:
        return len(self.pods) - len(self.current)

    @cached_property
    def failure(self) -> Failure | None:
        """Of the pods of the current template, of the others only while there are none; else why there are too few."""
        awaiting = awaiting_volume(self.observed)
        pods = [pod for pod in self.current or self.pods if pod.name not in awaiting]
        return failure(pods) or self._uncreated or self._turned_away

    @property
    def _uncreated(self) -> Failure | None:
        """A quota or a policy that refuses pods: the Deployment alone tells, for there is no pod to tell of it."""
        refused = self._condition("ReplicaFailure")
        if refused.get("status") != "True":
            return None
        return Failure(Reason.APPLY_FAILED, f"pods cannot be created: {refused.get('message', '')}", "")

    @property
    def _turned_away(self) -> Failure | None:
        template = template_hash(self.planned)
        pods = [pod for pod in self.observed.pods if pod.template == template]
        return turned_away(pods, self.desired, written(self.observed.wall - _RECENT))

    @cached_property
    def answering(self) -> frozenset[str]:
        """Pods of the current template that can be measured."""
        return frozenset(pod.name for pod in self.current) & frozenset(self.view.fresh)

    # -- the Deployment's own progress

    @property
    def unobserved(self) -> bool:
        """Whether the Deployment's controller has yet to see what was last applied."""
        generation = int(self.deployment.get("metadata", {}).get("generation") or 0)
        return self.counted("observedGeneration") < generation

    @property
    def unapplied(self) -> bool:
        """Whether the live template is another than the planned one."""
        return template_hash(self.deployment) != template_hash(self.planned)

    @property
    def deadline_exceeded(self) -> bool:
        if self.unobserved or self.unapplied:
            return False  # what the Deployment says is of an earlier spec: this one has its time yet
        progress = self._condition("Progressing")
        return bool(progress.get("reason") == "ProgressDeadlineExceeded" and progress.get("status") == "False")

    def _condition(self, kind: str) -> Mapping[str, Any]:
        """The Deployment's of that type; empty when there is none."""
        conditions = self.deployment.get("status", {}).get("conditions") or ()
        return next((condition for condition in conditions if condition.get("type") == kind), {})

    @cached_property
    def foreign_owner(self) -> str:
        """Who else writes the Deployment's replicas; empty when nobody does."""
        return foreign_writer(self.deployment) or self.observed.replicas_writer

    # -- measurements

    @cached_property
    def silent(self) -> tuple[str, ...]:
        """Ready pods that were asked for a while and did not answer, by name."""
        return tuple(
            sorted(
                name
                for name, samples in self.view.ready.items()
                if samples and name not in self.view.fresh and self.view.now - samples[0].at > STALE
            )
        )

    @property
    def unmeasurable(self) -> bool:
        return bool(self.view.ready) and 2 * len(self.silent) > len(self.view.ready)

    @cached_property
    def broken_drafts(self) -> tuple[tuple[str, str], ...]:
        """Reason and message of each pod of the current template that cannot use its draft."""
        answers = [self.view.fresh[name] for name in sorted(self.answering)]
        return tuple((a.draft_reason, a.draft_message) for a in answers if not a.draft_ok)

    @property
    def no_draft_works(self) -> bool:
        return bool(self.answering) and len(self.broken_drafts) == len(self.answering)


def _count(step: int | str, whole: int) -> int:
    """maxUnavailable as a number of pods; percentages round down, as the Deployment controller does."""
    if isinstance(step, str) and step.endswith("%"):
        return whole * int(step[:-1]) // 100
    return int(step)
