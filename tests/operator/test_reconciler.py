"""What a reconcile writes, also where the API server refuses some of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.build import DEFAULTS, SMALLEST, START, answer, merged
from tests.operator.fake_kube import FakeKube

from outrider_operator import labels
from outrider_operator.api.v1alpha1 import API_VERSION, KIND
from outrider_operator.cache import Cache, Key
from outrider_operator.clock import Clock
from outrider_operator.errors import Conflict, OutriderError, Rejected, Unavailable
from outrider_operator.events import Publisher
from outrider_operator.fleet.samples import Sample
from outrider_operator.kinds import watched
from outrider_operator.listing import Lister
from outrider_operator.metrics import Metrics
from outrider_operator.plan import Defaults
from outrider_operator.queue import Queue
from outrider_operator.reconciler import Reconciler
from outrider_operator.rounds import Rounds
from outrider_operator.secret import Tokens
from outrider_operator.telling import Teller
from outrider_operator.writes import Writes

KEY = Key("team", "llama")
QUOTA = "is forbidden: exceeded quota: small, requested: count=1, used: count=3, limited: count=3"


class Rig:
    """One object, and a reconciler that looks at it when told to."""

    def __init__(self, kube: FakeKube | None = None, defaults: Defaults = DEFAULTS) -> None:
        self.now = 1000.0
        self.kube, self.cache, self.queue = kube or FakeKube(), Cache(), Queue(clock=lambda: self.now)
        metadata = {"namespace": KEY.namespace, "name": KEY.name, "generation": 1}
        self.cache.put(self.kube.put({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": SMALLEST}))
        writes, tokens = Writes(self.kube, self.cache, self.queue), Tokens(self.kube)
        self.rounds = rounds = Rounds(_read, self.queue.add, clock=Clock(monotonic=lambda: self.now))
        self.told: list[tuple[str, str]] = []
        self.reconciler = Reconciler(
            self.kube,
            self.cache,
            self.queue,
            writes,
            rounds,
            tokens,
            Teller(self._put, rounds, tokens),
            Publisher(self.kube, "operator-1"),
            Metrics(self.cache, self.queue),
            defaults,
            clock=lambda: self.now,
            wall=lambda: START + timedelta(seconds=self.now - 1000.0),
        )

    async def _put(self, pod: Any, policy: Any, token: str) -> Any:
        self.told.append((pod.name, policy.revision))
        return answer(revision=policy.revision)

    async def pod(self, name: str, status: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        """One of the Deployment is as `status` says, and the object is looked at."""
        owner = {"kind": "ReplicaSet", "name": f"{KEY.name}-1", "uid": "r", "controller": True}
        of = {"labels": {labels.MODEL: KEY.name}, "ownerReferences": [owner]}
        whole = {"namespace": KEY.namespace, "name": name, **of, **(metadata or {})}
        self.cache.put(self.kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": whole, "status": status}))
        await self.reconciler.reconcile(KEY)

    async def serve(self, name: str) -> None:
        """A pod of the Deployment becomes ready and is read once."""
        ready = {"type": "Ready", "status": "True"}
        await self.pod(name, {"phase": "Running", "podIP": "10.0.0.1", "conditions": [ready]})
        while not self.rounds.fleet(KEY).samples:
            await asyncio.sleep(0)

    def edit(self, spec: dict[str, Any]) -> None:
        live = self.kube.objects[KIND, *KEY]
        generation = live["metadata"]["generation"] + 1
        self.cache.put(self.kube.put(merged(live, {"metadata": {"generation": generation}, "spec": spec})))

    def hear(self) -> None:
        """What the watches would have said by now."""
        for (kind, _, _), body in self.kube.objects.items():
            if kind in (KIND, "Deployment"):
                self.cache.put(body)

    def refuse(self, verb: str, kind: str) -> None:
        self.kube.fault = _refusing(verb, kind)

    def condition(self, kind: str) -> dict[str, Any]:
        status = self.kube.objects[KIND, *KEY].get("status", {})
        return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})

    def events(self) -> list[tuple[str, str]]:
        return [(body["reason"], body["note"]) for (kind, _, _), body in self.kube.objects.items() if kind == "Event"]


def _refusing(refused_verb: str, refused_kind: str) -> Callable[[str, str, str], None]:
    def fault(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == (refused_verb, refused_kind):
            raise Rejected(f"{verb} {kind} {name}: 403 {name} {QUOTA}", 403)

    return fault


def _failing(failing_verb: str, failing_kind: str, error: OutriderError) -> Callable[[str, str, str], None]:
    def fault(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == (failing_verb, failing_kind):
            raise error

    return fault


async def _read(pods: Any) -> dict[str, Any]:
    return {pod.name: Sample(1000.0, answer(revision="of another policy")) for pod in pods}


@pytest.mark.parametrize(
    ("verb", "kind"),
    [("create", "Secret"), ("get", "Service"), ("apply", "Deployment")],
    ids=("token", "look", "child"),
)
async def test_whatever_the_api_server_refuses_is_said_in_status(verb: str, kind: str) -> None:
    rig = Rig()
    rig.refuse(verb, kind)
    with pytest.raises(Rejected):
        await rig.reconciler.reconcile(KEY)
    accepted = rig.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "ApplyFailed")
    assert "exceeded quota" in accepted["message"]


async def test_what_was_refused_is_made_and_no_longer_said_once_it_is_allowed() -> None:
    rig = Rig()
    rig.refuse("create", "Secret")
    with pytest.raises(Rejected):
        await rig.reconciler.reconcile(KEY)
    rig.kube.fault = lambda verb, kind, name: None
    await rig.reconciler.reconcile(KEY)
    assert rig.condition("Accepted")["status"] == "True"
    assert ("Secret", "team", "llama-admin") in rig.kube.objects


async def test_what_the_api_server_refuses_is_an_event_once() -> None:
    rig = Rig()
    rig.refuse("apply", "Deployment")
    for _ in range(3):
        with pytest.raises(Rejected):
            await rig.reconciler.reconcile(KEY)
    [(_, note)] = [event for event in rig.events() if event[0] == "Refused"]
    assert note.startswith("ApplyFailed: ")


async def test_a_network_policy_goes_with_the_setting_that_asked_for_it() -> None:
    guarded = Rig(defaults=replace(DEFAULTS, network_policy=True))
    await guarded.reconciler.reconcile(KEY)
    assert ("NetworkPolicy", "team", "llama") in guarded.kube.objects
    restarted = Rig(guarded.kube)
    await Lister(restarted.kube, restarted.cache, restarted.queue, watched(), ()).first()
    await restarted.reconciler.reconcile(KEY)
    assert ("NetworkPolicy", "team", "llama") not in restarted.kube.objects
    assert ("Deployment", "team", "llama") in restarted.kube.objects


async def test_replicas_that_the_api_server_refuses_are_not_told_as_scaled() -> None:
    rig = Rig()
    rig.edit({"autoscaling": {"minReplicas": 1, "maxReplicas": 5, "targetConcurrency": 10}})
    await rig.reconciler.reconcile(KEY)
    rig.edit({"autoscaling": {"minReplicas": 3}})
    rig.refuse("apply", "Deployment")
    for _ in range(3):
        with pytest.raises(Rejected):
            await rig.reconciler.reconcile(KEY)
    status = rig.kube.objects[KIND, *KEY]["status"]
    assert rig.condition("Accepted")["reason"] == "ApplyFailed"
    assert [reason for reason, _ in rig.events() if reason == "ScaledUp"] == []
    assert "recentDecisions" not in status.get("autoscaling", {})
    rig.kube.fault = lambda verb, kind, name: None
    await rig.reconciler.reconcile(KEY)
    assert [note for reason, note in rig.events() if reason == "ScaledUp"] == ["from 1 to 3 replicas: minReplicas is 3"]
    [decision] = rig.kube.objects[KIND, *KEY]["status"]["autoscaling"]["recentDecisions"]
    assert (decision["from"], decision["to"]) == (1, 3)


async def test_a_claim_that_the_api_server_refuses_is_said_and_holds_up_nothing_else() -> None:
    """As where its storage class lets no claim grow."""
    rig = Rig()
    rig.edit({"cache": {"size": "10Gi"}})
    await rig.reconciler.reconcile(KEY)
    rig.hear()
    rig.refuse("apply", "PersistentVolumeClaim")
    rig.edit({"cache": {"size": "20Gi"}, "engine": {"image": "mine:2"}, "replicas": 2})
    with pytest.raises(Rejected):
        await rig.reconciler.reconcile(KEY)
    deployment = rig.kube.objects["Deployment", *KEY]["spec"]
    assert deployment["replicas"] == 2
    assert deployment["template"]["spec"]["containers"][0]["image"] == "mine:2"
    accepted = rig.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "ApplyFailed")
    assert "PersistentVolumeClaim llama-cache" in accepted["message"]


async def test_replicas_changed_beside_a_refused_claim_are_told_once() -> None:
    rig = Rig()
    rig.edit({"cache": {"size": "10Gi"}, "autoscaling": {"minReplicas": 1, "maxReplicas": 5, "targetConcurrency": 10}})
    rig.refuse("apply", "PersistentVolumeClaim")
    for least in (1, 3, 3):
        rig.hear()
        rig.edit({"autoscaling": {"minReplicas": least}})
        with pytest.raises(Rejected):
            await rig.reconciler.reconcile(KEY)
    status = rig.kube.objects[KIND, *KEY]["status"]
    assert [(d["from"], d["to"]) for d in status["autoscaling"]["recentDecisions"]] == [(1, 3)]
    assert [note for reason, note in rig.events() if reason == "ScaledUp"] == ["from 1 to 3 replicas: minReplicas is 3"]


class _Lost(FakeKube):
    """Writes of the kind that is `lost` are carried out, and their answers never arrive."""

    lost = ""

    async def apply(self, body: Any) -> dict[str, Any]:
        return self._answered(await super().apply(body))

    async def apply_status(self, body: Any) -> dict[str, Any]:
        return self._answered(await super().apply_status(body))

    def _answered(self, answer: dict[str, Any]) -> dict[str, Any]:
        if answer["kind"] == self.lost:
            raise Unavailable(f"{self.lost}: TimeoutError")
        return answer


async def _scaled(kube: FakeKube | None = None) -> Rig:
    """Where the next look scales from 1 to 3."""
    rig = Rig(kube)
    rig.edit({"autoscaling": {"minReplicas": 1, "maxReplicas": 5, "targetConcurrency": 10}})
    await rig.reconciler.reconcile(KEY)
    rig.hear()
    rig.edit({"autoscaling": {"minReplicas": 3}})
    return rig


def _decisions(rig: Rig) -> list[tuple[int, int, str]]:
    told = rig.kube.objects[KIND, *KEY]["status"].get("autoscaling", {})
    decisions = told.get("recentDecisions", [])
    assert told.get("lastScaleTime") == (decisions[-1]["time"] if decisions else None)
    return [(each["from"], each["to"], each["reason"]) for each in decisions]


@pytest.mark.parametrize(
    "error",
    [Conflict("409"), Unavailable("TimeoutError"), Rejected("500", 500), Rejected("422 of an older CRD", 422)],
    ids=("conflict", "timeout", "error", "refusal"),
)
async def test_a_step_that_no_status_could_be_written_of_is_told_by_the_next(error: OutriderError) -> None:
    rig = await _scaled()
    rig.kube.fault = _failing("apply_status", KIND, error)
    for _ in range(2):
        with pytest.raises(type(error)):
            await rig.reconciler.reconcile(KEY)
        rig.hear()
    rig.edit({"autoscaling": {"minReplicas": 4}})
    with pytest.raises(type(error)):
        await rig.reconciler.reconcile(KEY)
    assert rig.kube.objects["Deployment", *KEY]["spec"]["replicas"] == 4
    assert _decisions(rig) == []
    rig.kube.fault = lambda verb, kind, name: None
    for _ in range(2):
        await rig.reconciler.reconcile(KEY)
        assert _decisions(rig) == [(1, 3, "minReplicas is 3"), (3, 4, "minReplicas is 4")]
        rig.hear()
    assert rig.kube.objects["Deployment", *KEY]["spec"]["replicas"] == 4


@pytest.mark.parametrize("lost", ["Deployment", KIND])
async def test_a_step_is_told_once_whichever_answer_is_lost(lost: str) -> None:
    kube = _Lost()
    rig = await _scaled(kube)
    kube.lost = lost
    with pytest.raises(Unavailable):
        await rig.reconciler.reconcile(KEY)
    kube.lost = ""
    for spec in ({}, {"autoscaling": {"minReplicas": 1}, "suspend": True}, {"suspend": False}):
        rig.hear()
        rig.edit(spec)
        await rig.reconciler.reconcile(KEY)
        assert _decisions(rig) == [(1, 3, "minReplicas is 3")]
    assert kube.objects["Deployment", *KEY]["spec"]["replicas"] == 1


async def test_a_step_that_was_never_taken_is_never_told() -> None:
    rig = await _scaled()
    rig.kube.fault = _failing("apply", "Deployment", Unavailable("connection refused"))
    with pytest.raises(Unavailable):
        await rig.reconciler.reconcile(KEY)
    rig.kube.fault = lambda verb, kind, name: None
    rig.edit({"autoscaling": {"minReplicas": 1}})
    await rig.reconciler.reconcile(KEY)
    assert _decisions(rig) == []
    assert rig.kube.objects["Deployment", *KEY]["spec"]["replicas"] == 1


class _Autoscaler(FakeKube):
    """With an HPA of the user's on the Deployment: each apply of ours takes the field that the HPA had written."""

    def scale(self, replicas: int) -> None:
        owner = {"manager": "hpa", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
        live = self.objects["Deployment", *KEY]
        self.put(merged(live, {"spec": {"replicas": replicas}, "metadata": {"managedFields": [owner]}}))

    async def apply(self, body: Any) -> dict[str, Any]:
        return await super().apply(merged(body, {"metadata": {"managedFields": []}}))


async def test_who_writes_fixed_replicas_again_and_again_is_named_while_they_are_set_back() -> None:
    kube = _Autoscaler()
    rig = Rig(kube)
    await rig.reconciler.reconcile(KEY)
    for _ in range(4):
        kube.scale(5)
        for _ in range(3):  # at once, and in the rounds until it writes again
            rig.hear()
            await rig.reconciler.reconcile(KEY)
            rig.now += 5
            assert kube.objects["Deployment", *KEY]["spec"]["replicas"] == 1
            assert rig.condition("ScalingActive")["reason"] == "ReplicasOwnedElsewhere"
            assert rig.condition("ScalingActive")["message"].startswith("hpa ")
    rig.now += 60
    rig.hear()
    await rig.reconciler.reconcile(KEY)
    assert rig.condition("ScalingActive")["reason"] == "FixedReplicas"


async def test_pods_are_told_what_was_decided_although_the_status_is_refused() -> None:
    """As by an older CRD, which does not declare all its fields."""
    rig = Rig()
    await rig.reconciler.reconcile(KEY)
    await rig.serve("llama-1-a")
    rig.edit({})
    rig.refuse("apply_status", KIND)
    with pytest.raises(Rejected):
        await rig.reconciler.reconcile(KEY)
    assert [name for name, _ in rig.told] == ["llama-1-a"]
    await rig.rounds.close()


@pytest.mark.parametrize(
    ("refused", "told"),
    [("Deployment", ["llama-1-a"]), ("ConfigMap", [])],
    ids=("after the policy", "the policy itself"),
)
async def test_pods_are_told_a_policy_that_is_written_whatever_else_is_refused(refused: str, told: list[str]) -> None:
    rig = Rig()
    await rig.reconciler.reconcile(KEY)
    await rig.serve("llama-1-a")
    rig.edit({"replicas": 2, "speculativeDecoding": {"numSpeculativeTokens": 3}})
    rig.refuse("apply", refused)
    with pytest.raises(Rejected):
        await rig.reconciler.reconcile(KEY)
    assert rig.condition("Accepted")["reason"] == "ApplyFailed"
    assert [name for name, _ in rig.told] == told
    await rig.rounds.close()


class _Kept(FakeKube):
    """Somebody else owns fields of the status, too, such as who restored it from a backup: apply removes none."""

    async def apply_status(self, body: Any) -> dict[str, Any]:
        theirs = {"draft": {"parameters": 7}, "speculativeDecoding": {"acceptancePercent": 71}}
        return await super().apply_status({**body, "status": merged(theirs, body["status"])})


async def test_a_field_of_the_status_that_somebody_else_keeps_is_no_reason_to_write_at_every_look() -> None:
    rig = Rig(_Kept())
    for _ in range(4):
        await rig.reconciler.reconcile(KEY)
        rig.hear()
    assert rig.kube.objects[KIND, *KEY]["status"]["draft"] == {"parameters": 7}
    assert len([verb for verb, _, _ in rig.kube.calls if verb == "apply_status"]) <= 2
    rig.edit({"replicas": 2})
    await rig.reconciler.reconcile(KEY)
    assert rig.kube.objects[KIND, *KEY]["status"]["desiredReplicas"] == 2


async def test_a_pod_whose_volume_does_not_come_is_looked_at_again_though_nothing_happens() -> None:
    rig = Rig()
    await rig.reconciler.reconcile(KEY)
    unbound = {"type": "PodScheduled", "status": "False", "message": "pod has unbound immediate PersistentVolumeClaims"}
    created = {"creationTimestamp": f"{START:%Y-%m-%dT%H:%M:%SZ}"}
    await rig.pod("llama-1", {"phase": "Pending", "conditions": [unbound]}, created)
    assert rig.condition("Ready")["reason"] == "RollingOut"
    rig.now += 15
    assert rig.queue.take() is None
    rig.now += 2
    assert rig.queue.take() == KEY
    await rig.reconciler.reconcile(KEY)
    assert rig.condition("Ready")["reason"] == "Unschedulable"
