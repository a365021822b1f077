"""Values for tests: models, pods, samples, and a small cluster in which a plan takes effect. No clock, no sockets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from outrider_operator import labels
from outrider_operator.api.reasons import SpeculationState
from outrider_operator.api.v1alpha1 import SpeculativeModelSpec
from outrider_operator.fleet.history import remember, window
from outrider_operator.fleet.policy import Policy
from outrider_operator.fleet.samples import Answer, Counters, Fleet, Sample
from outrider_operator.observe import Child, Model, Observed, Pod
from outrider_operator.plan import Defaults, Plan, plan
from outrider_operator.render.deployment import template_hash
from outrider_operator.status import status

DEFAULTS = Defaults(runtime_image="outrider-runtime:1")
START = datetime(2026, 1, 1, tzinfo=UTC)
SMALLEST: dict[str, Any] = {"model": {"uri": "hf://Qwen/Qwen2.5-7B-Instruct"}}
DRAFTED: dict[str, Any] = {
    "model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct", "tokenSecretRef": {"name": "hf-token", "key": "token"}},
    "speculativeDecoding": {
        "draft": {"uri": "hf://meta-llama/Llama-3.2-1B-Instruct"},
        "numSpeculativeTokens": 5,
        "saturation": {"disableAtConcurrency": 16, "enableAtConcurrency": 12},
    },
    "engine": {"maxModelLength": 8192, "memoryUtilizationPercent": 90},
    "autoscaling": {"minReplicas": 1, "maxReplicas": 8, "targetConcurrency": 10},
}
HEAD: dict[str, Any] = {
    "speculativeDecoding": {
        "method": "Eagle3",
        "draft": {"uri": "hf://yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"},
    },
}


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Specs laid over each other, objects merged; a None removes a field."""
    result: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if value is None:
                result.pop(name, None)
            elif isinstance(value, Mapping):
                result[name] = merged(result.get(name) or {}, value)
            else:
                result[name] = value
    return result


def spec(*parts: Mapping[str, Any]) -> SpeculativeModelSpec:
    return SpeculativeModelSpec.model_validate(merged(SMALLEST, *parts))


def model(*parts: Mapping[str, Any], **fields: Any) -> Model:
    values = {"namespace": "team", "name": "llama", "uid": "uid-1", "generation": 1, "spec": spec(*parts)}
    return Model(**(values | fields))


def observed(*parts: Mapping[str, Any], **fields: Any) -> Observed:
    values = {"model": model(*parts), "children": {}, "pods": (), "fleet": Fleet(), "now": 1000.0, "wall": START}
    return Observed(**(values | fields))


def pod(name: str = "llama-1", **fields: Any) -> Pod:
    values = {"ip": "10.0.0.1", "template": "t", "ready": False, "deleting": False, "phase": "Running"}
    return Pod(name=name, **(values | fields))


def answer(counters: Counters | None = None, **fields: Any) -> Answer:
    values: dict[str, Any] = {
        "revision": "",
        "state": "Active",
        "reason": "",
        "message": "",
        "tokens": 4.0,
        "max_tokens": 4,
        "counters": counters or Counters(0, 0, 0, 0, 0, 0, 0, 0),
        "running": 0.0,
        "waiting": 0.0,
        "break_even_concurrency": None,
        "speedup": None,
        "model_revision": "5e2f",
        "model_parameters": 134515008,
        "model_dtype": "Float32",
        "draft_ok": True,
        "draft_reason": "",
        "draft_message": "",
        "draft_revision": "",
        "draft_parameters": 1000,
    }
    return Answer(**(values | fields))


@dataclass(frozen=True, slots=True)
class Did:
    """What one pod did in one period of five seconds."""

    running: float = 0.0
    waiting: float = 0.0
    rejected: float = 0.0
    answered: bool = True
    acceptance: float = 0.6
    drafting: bool = True
    length: float = 4.0  # of a draft; below 1 few steps have one
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its answer


def samples(periods: Sequence[Did | float | None], start: float = 0.0, first: bool = True) -> tuple[Sample, ...]:
    """A pod's history from what it did: numbers are running requests, None a reading that failed."""
    total = Counters(0, 0, 0, 0, 0, 0, 0, 1.0)
    history = [Sample(start, answer(total))] if first else []
    for number, each in enumerate(periods, start=1):
        did = each if isinstance(each, Did) else Did(each or 0.0, answered=each is not None)
        total = counted(total, did)
        history.append(sample(start + 5.0 * number, total, did))
    return tuple(history)


def counted(total: Counters, did: Did, seconds: float = 5.0) -> Counters:
    steps = did.running * 10
    drafts = steps * min(1.0, did.length) if did.drafting else 0.0
    drafted = steps * did.length if did.drafting else 0.0
    return Counters(
        running_request_seconds=total.running_request_seconds + did.running * seconds,
        waiting_request_seconds=total.waiting_request_seconds + did.waiting * seconds,
        drafts=total.drafts + drafts,
        draft_tokens=total.draft_tokens + drafted,
        accepted_tokens=total.accepted_tokens + drafted * did.acceptance,
        generated_tokens=total.generated_tokens + steps + drafted * did.acceptance,
        rejected_requests=total.rejected_requests + did.rejected,
        uptime_seconds=total.uptime_seconds + seconds,
    )


def sample(at: float, total: Counters, did: Did) -> Sample:
    if not did.answered:
        return Sample(at, None, "no answer from port 8001 within 4 s")
    return Sample(at, answer(total, running=did.running, waiting=did.waiting, **did.fields))


def child(rendered: Mapping[str, Any], **live: Any) -> Child:
    body = merged(rendered, live)
    return Child(body["kind"], body["metadata"]["name"], body["metadata"]["annotations"][labels.HASH], body)


@dataclass
class Cluster:
    """One model in a cluster where plans take effect: a plan's children exist at once, pods start in `starts_in`
    seconds, and every five seconds pods carry `load` requests, spread evenly, and draft while they are told to."""

    model: Model
    starts_in: float = 20.0
    room: int = 1000  # pods that can be scheduled
    defaults: Defaults = DEFAULTS
    now: float = 1000.0
    jumped: float = 0.0  # seconds by which the wall clock is wrong
    children: dict[str, Child] = field(default_factory=dict)
    pods: dict[str, tuple[Pod, float]] = field(default_factory=dict)  # and when it was created
    totals: dict[str, Counters] = field(default_factory=dict)
    acceptance: float = 0.6
    break_even: int | None = None  # what pods measure while they draft
    measured_even: dict[str, int | None] = field(default_factory=dict)  # by pod, and know of it
    told: dict[str, Policy | None] = field(default_factory=dict)  # by pod
    fleet: Fleet = field(default_factory=Fleet)
    plans: list[tuple[float, Plan]] = field(default_factory=list)
    made: int = 0

    def observed(self) -> Observed:
        return Observed(
            model=self.model,
            children=dict(self.children),
            pods=tuple(each for each, _ in self.pods.values()),
            fleet=self.fleet,
            now=self.now,
            wall=START + timedelta(seconds=self.now + self.jumped),
            status_written_at=None,
        )

    def reconcile(self) -> Plan:
        seen = self.observed()
        planned = plan(seen, self.defaults)
        if planned.refusal is None:
            self.children = {c["kind"]: child(c, **self._live(c)) for c in planned.children}
        self.model = replace(self.model, status=status(seen, planned))
        self.plans.append((self.now, planned))
        self.told = {name: planned.policy_of(name) for name in self.pods}
        return planned

    def run(self, seconds: float, load: float = 0.0, silent: Sequence[str] = ()) -> None:
        """Periods of five seconds: pods start and end, work, are read, and the model is looked at."""
        for _ in range(math.ceil(seconds / 5)):
            self.now += 5
            self._schedule()
            ready = [each.name for each, _ in self.pods.values() if each.ready]
            read = {}
            for name in ready:
                did = self._did(name, load / len(ready), name not in silent)
                self.totals[name] = counted(self.totals.get(name, Counters(0, 0, 0, 0, 0, 0, 0, 0)), did)
                read[name] = sample(self.now, self.totals[name], did)
            self.measured(read)

    def _did(self, name: str, running: float, answered: bool) -> Did:
        policy = self.told.get(name)
        drafting = policy is None or policy.state == SpeculationState.ACTIVE
        if drafting:
            self.measured_even[name] = self.break_even
        fields = {
            "revision": policy.revision if policy else "",
            "break_even_concurrency": self.measured_even.get(name),
        }
        return Did(running, answered=answered, acceptance=self.acceptance, drafting=drafting, fields=fields)

    def measured(self, read: Mapping[str, Sample]) -> Plan:
        """A round of reading the ready pods, and what is planned on it."""
        keep = window(self.model.spec) if self.model.spec else 60.0
        self.fleet = remember(self.fleet, read, self.now, keep)
        return self.reconcile()

    def edit(self, *parts: Mapping[str, Any]) -> None:
        assert self.model.spec is not None
        body = merged(self.model.spec.model_dump(by_alias=True, exclude_none=True, mode="json"), *parts)
        edited = SpeculativeModelSpec.model_validate(body)
        self.model = replace(self.model, spec=edited, generation=self.model.generation + 1)

    def restart_operator(self) -> None:
        self.fleet = Fleet()

    @property
    def template(self) -> str:
        return template_hash(self.children["Deployment"].body)

    @property
    def replicas(self) -> int:
        return int(self.children["Deployment"].body["spec"]["replicas"])

    @property
    def state(self) -> str:
        return str(self.model.status["speculativeDecoding"]["state"])

    def events(self) -> list[str]:
        return [str(event.reason) for _, planned in self.plans for event in planned.events]

    def condition(self, kind: str) -> dict[str, Any]:
        return next((c for c in self.model.status["conditions"] if c["type"] == kind), {})

    def _schedule(self) -> None:
        """What the Deployment controller and a kubelet would have done by now; a new template replaces at once."""
        template, wanted = self.template, self.replicas
        keep = [name for name, (each, _) in self.pods.items() if each.template == template][:wanted]
        self.pods = {name: self.pods[name] for name in keep}
        while len(self.pods) < wanted:
            self.made += 1
            self.pods[f"llama-{self.made:03}"] = (pod(f"llama-{self.made:03}", template=template), self.now)
        for number, (name, (each, created)) in enumerate(list(self.pods.items())):
            fits = number < self.room
            waits = "" if fits else "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
            ready = fits and (each.ready or self.now - created >= self.starts_in)
            self.pods[name] = (replace(each, ready=ready, unschedulable=waits), created)
        self.counted()

    def counted(self) -> None:
        """The Deployment's status, from its pods as they are now."""
        body = self.children["Deployment"].body
        self.children["Deployment"] = child(body, **self._live(body))

    def _live(self, rendered: Mapping[str, Any]) -> dict[str, Any]:
        if rendered["kind"] != "Deployment":
            return {}
        ready = sum(each.ready for each, _ in self.pods.values())
        counts = {"replicas": len(self.pods), "updatedReplicas": len(self.pods)}
        counts |= {"readyReplicas": ready, "availableReplicas": ready, "observedGeneration": 1}
        return {"metadata": {"generation": 1}, "status": counts}
