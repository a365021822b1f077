"""Each condition, by the situation it speaks of."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.operator.build import DEFAULTS, DRAFTED, START, Did, child, merged, model, observed, pod, samples

from outrider_operator import labels
from outrider_operator.api.reasons import ConditionType, Reason, Status
from outrider_operator.api.v1alpha1 import SpeculativeModelStatus
from outrider_operator.fleet.samples import Fleet
from outrider_operator.plan import plan
from outrider_operator.render.deployment import template_hash
from outrider_operator.status import status

ALWAYS = {
    ConditionType.READY,
    ConditionType.ACCEPTED,
    ConditionType.MODEL_READY,
    ConditionType.DRAFT_READY,
    ConditionType.AVAILABLE,
    ConditionType.SCALING_ACTIVE,
    ConditionType.SPECULATION_ACTIVE,
}
BUSY = Did(running=1)
BROKEN = {"draft_ok": False, "draft_reason": "TokenizerMismatch", "draft_message": "they disagree on token 5"}


class Situation:
    """A model with its Deployment, of which tests change what they are about."""

    def __init__(self, *parts, ready=1, periods=13, did=BUSY, **fields):
        self.model = model(*parts, **fields)
        seen = observed(model=self.model)
        self.template = ""
        self.children = {c["kind"]: child(c) for c in plan(seen, DEFAULTS).children}
        self.pods = []
        self.samples = {}
        if self.children:
            self.template = template_hash(self.children["Deployment"].body)
            self.deployment(available=ready)
        for number in range(ready):
            self.pod(f"llama-{number}", ready=True)
            self.samples[f"llama-{number}"] = samples([did] * periods)
        self.now = 5.0 * periods
        self.fields = {}

    def pod(self, name="llama-x", **fields):
        self.pods.append(pod(name, **{"template": self.template, **fields}))
        return self

    def deployment(self, available=1, observed_generation=1, generation=1, **status):
        counts = {"replicas": available, "readyReplicas": available, "availableReplicas": available}
        live = {"status": counts | {"updatedReplicas": available, "observedGeneration": observed_generation} | status}
        body = merged(self.children["Deployment"].body, {"metadata": {"generation": generation}}, live)
        self.children["Deployment"] = replace(self.children["Deployment"], body=body)
        return self

    def remembering(self, **fields):
        """What was decided before, as the ConfigMap keeps it: the plan's own memory, with these fields changed."""
        memory = {**self.plan().memory.to_json(), **fields}
        config_map = self.children["ConfigMap"]
        self.children["ConfigMap"] = replace(
            config_map, body={**config_map.body, "data": {"memory": json.dumps(memory)}}
        )
        return self

    def before(self, *conditions):
        """An earlier status of this generation with these conditions, given as type, status and reason."""
        said = [
            {"type": t, "status": s, "reason": r, "message": "", "observedGeneration": 1, "lastTransitionTime": "then"}
            for t, s, r in conditions
        ]
        self.model = replace(self.model, status={"observedGeneration": 1, "conditions": said})
        return self

    def observed(self):
        ready = {each.name for each in self.pods if each.ready}
        fleet = Fleet({name: those for name, those in self.samples.items() if name in ready})
        values = {"children": self.children, "pods": tuple(self.pods), "fleet": fleet, "now": self.now}
        return observed(**{"model": self.model, **values, **self.fields})

    def plan(self):
        return plan(self.observed(), DEFAULTS)

    def status(self):
        result = status(self.observed(), self.plan())
        SpeculativeModelStatus.model_validate(result)
        return result

    def conditions(self):
        return {c["type"]: c for c in self.status()["conditions"]}

    def says(self, kind):
        found = self.conditions().get(kind)
        return found and (found["status"], found["reason"])


def test_every_condition_is_there_from_the_first_status_on_and_unknown_where_nothing_is():
    seen = observed()
    found = {c["type"]: c for c in status(seen, plan(seen, DEFAULTS))["conditions"]}
    assert set(found) == ALWAYS | {ConditionType.RECONCILING}
    for kind in ("Ready", "ModelReady", "Available", "SpeculationActive"):
        assert (found[kind]["status"], found[kind]["reason"]) == ("Unknown", "Pending")
    assert {c["observedGeneration"] for c in found.values()} == {1}


def test_a_served_model_has_all_it_needs_and_nothing_under_way():
    situation = Situation()
    assert set(situation.conditions()) == ALWAYS
    assert situation.says("Ready") == ("True", "Ready")
    assert situation.says("Accepted") == ("True", "Accepted")
    assert situation.says("ModelReady") == ("True", "Loaded")
    assert situation.says("DraftReady") == ("True", "NotRequired")
    assert situation.says("Available") == ("True", "Available")
    assert situation.says("ScalingActive") == ("False", "FixedReplicas")
    assert situation.says("SpeculationActive") == ("True", "Drafting")


# -- Accepted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("situation", "reason", "words"),
    [
        (Situation(spec=None, refusal="spec.replicas: must be a number"), Reason.INVALID_SPEC, "spec.replicas"),
        (Situation({"engine": {"tensorParallelSize": 4}}), Reason.UNSUPPORTED_PARALLELISM, "tensorParallelSize 4"),
        (Situation({"podTemplate": {"replicas": 1}}), Reason.POD_TEMPLATE_REFUSED, "podTemplate.replicas"),
    ],
    ids=("invalid", "parallelism", "pod template"),
)
def test_a_refusal_is_said_by_accepted_ready_and_stalled(situation, reason, words):
    found = situation.conditions()
    assert (found["Accepted"]["status"], found["Accepted"]["reason"]) == ("False", reason)
    assert words in found["Accepted"]["message"]
    assert (found["Ready"]["status"], found["Ready"]["reason"]) == ("False", reason)
    assert (found["Stalled"]["status"], found["Stalled"]["reason"]) == ("True", reason)
    assert "Reconciling" not in found


def test_a_name_that_somebody_else_has_is_a_conflict():
    situation = Situation()
    situation.fields = {"conflicts": ("Service llama (owned by Deployment web)",)}
    assert situation.says("Accepted") == ("False", "NameConflict")
    assert "Service llama" in situation.conditions()["Accepted"]["message"]


def test_what_the_api_server_refused_is_said():
    situation = Situation()
    situation.fields = {"apply_error": "Deployment llama: forbidden"}
    assert situation.says("Accepted") == ("False", "ApplyFailed")
    assert situation.says("Ready") == ("False", "ApplyFailed")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((DRAFTED, {"autoscaling": {"targetConcurrency": 16}}), "targetConcurrency 16 is not below"),
        (({"cache": {"size": "1Gi"}, "replicas": 2},), "ReadWriteMany"),
        ((DRAFTED,), ""),
    ],
    ids=("target at saturation", "one claim for many", "nothing"),
)
def test_what_is_accepted_but_may_surprise_is_said_in_the_message(parts, words):
    situation = Situation(*parts)
    assert situation.says("Accepted") == ("True", "Accepted")
    message = situation.conditions()["Accepted"]["message"]
    assert words in message if words else message == "the spec is being served"


def test_a_claim_for_one_node_is_named_when_there_are_to_be_more_replicas():
    situation = Situation({"cache": {"size": "1Gi"}}, ready=2)
    situation.model = model({"cache": {"size": "1Gi"}, "replicas": 2})
    assert "was created ReadWriteOnce" in situation.conditions()["Accepted"]["message"]


def test_a_claim_larger_than_the_spec_asks_for_is_named():
    situation = Situation({"cache": {"size": "2Gi"}})
    situation.model = model({"cache": {"size": "1Gi"}})
    assert situation.says("Accepted") == ("True", "Accepted")
    assert "cache.size 1Gi: the claim has 2Gi" in situation.conditions()["Accepted"]["message"]
    assert situation.says("Ready") == ("True", "Ready")


# -- Ready ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [{"suspend": True}, {"replicas": 0}], ids=str)
def test_a_suspended_model_is_ready_so_that_nobody_waits_for_it(parts):
    situation = Situation(parts, ready=0)
    assert situation.says("Ready") == ("True", "Suspended")
    assert situation.says("Available") == ("False", "Suspended")
    assert "Stalled" not in situation.deployment(available=0, conditions=[_late()]).conditions()


def _late():
    return {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}


@pytest.mark.parametrize(
    ("parts", "available", "ready"),
    [
        ({"replicas": 1}, 0, False),
        ({"replicas": 1}, 1, True),
        ({"replicas": 4}, 2, False),
        ({"replicas": 4}, 3, True),
        ({"replicas": 4, "engine": {"device": "CPU"}}, 3, False),
        ({"replicas": 4, "engine": {"device": "CPU"}}, 4, True),
        ({"replicas": 10, "rollout": {"maxUnavailable": "25%"}}, 7, False),
        ({"replicas": 10, "rollout": {"maxUnavailable": "25%"}}, 8, True),
        ({"replicas": 2, "rollout": {"maxUnavailable": "100%"}}, 1, True),
        ({"autoscaling": {"minReplicas": 2, "maxReplicas": 9, "targetConcurrency": 4}}, 1, True),
        ({"autoscaling": {"minReplicas": 3, "maxReplicas": 9, "targetConcurrency": 4}}, 1, False),
    ],
    ids=str,
)
def test_readiness_asks_for_the_floor_less_what_a_rollout_may_take(parts, available, ready):
    situation = Situation(parts, ready=available)
    found = situation.says("Ready")
    assert found == (("True", "Ready") if ready else ("False", "Loading" if not available else "TooFewReplicas"))
    assert (situation.says("Available")[0] == "True") is ready


def test_ready_is_not_said_by_pods_of_an_old_template():
    situation = Situation().pod("old", template="old", ready=True)
    assert situation.says("Ready") == ("False", "RollingOut")
    assert situation.says("Reconciling") == ("True", "RollingOut")
    assert situation.says("Available") == ("True", "Available")


def test_a_leaving_old_pod_holds_up_nothing():
    assert Situation().pod("old", template="old", deleting=True).says("Ready") == ("True", "Ready")


def test_ready_waits_for_the_deployment_to_see_the_spec():
    situation = Situation().deployment(observed_generation=1, generation=2)
    assert situation.says("Ready") == ("False", "RollingOut")
    assert "Reconciling" in situation.conditions()


def test_a_scaling_step_does_not_make_a_ready_model_unready_until_its_deployment_notices():
    situation = Situation().before(("Ready", "True", "Ready")).deployment(observed_generation=1, generation=2)
    assert situation.says("Ready") == ("True", "Ready")
    assert "Reconciling" not in situation.conditions()


def test_other_replicas_by_scale_do_not_make_a_ready_model_unready_until_its_deployment_notices():
    fewer = Situation({"replicas": 3}, ready=3).before(("Ready", "True", "Ready"))
    fewer.model = model({"replicas": 2}, generation=2, status=fewer.model.status)
    fewer.deployment(available=3, observed_generation=1, generation=2)
    assert fewer.says("Ready") == ("True", "Ready")
    assert fewer.says("Reconciling") == ("True", "Loading")
    more = Situation().before(("Ready", "True", "Ready"))
    more.model = model({"replicas": 3}, generation=2, status=more.model.status)
    assert more.deployment(observed_generation=1, generation=2).says("Ready") == ("False", "TooFewReplicas")


def test_a_new_template_not_yet_applied_is_a_rollout():
    situation = Situation()
    situation.model = model({"model": {"revision": "v2"}}, generation=2)
    assert situation.says("Ready") == ("False", "RollingOut")


def test_a_rollout_held_up_says_by_what_while_the_old_pods_serve():
    situation = Situation({"engine": {"device": "CPU"}}).pod("new", waiting_reason="ImagePullBackOff")
    situation.pods[0] = replace(situation.pods[0], template="old")
    assert situation.says("Ready") == ("False", "ImagePullFailed")
    assert situation.says("Available") == ("True", "Available")


def test_a_pod_failure_is_the_reason_and_goes_when_the_pod_recovers():
    situation = Situation(ready=0).pod("llama-1", unschedulable="1 Insufficient nvidia.com/gpu")
    assert situation.says("Ready") == ("False", "InsufficientGPU")
    assert situation.says("ModelReady") == ("False", "InsufficientGPU")
    assert situation.conditions()["Ready"]["message"] == "pod llama-1: 1 Insufficient nvidia.com/gpu"
    assert Situation().says("Ready") == ("True", "Ready")


UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"


@pytest.mark.parametrize(
    ("seconds", "message", "reason", "look_again"),
    [
        (14, UNBOUND, "Loading", 16.0),
        (16, UNBOUND, "Unschedulable", None),
        (1, "0/1 nodes are available: 1 Insufficient memory.", "Unschedulable", None),
    ],
)
def test_a_new_claim_s_volume_has_its_time_before_it_is_a_failure(seconds, message, reason, look_again):
    created = f"{START - timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"
    situation = Situation(ready=0).pod("llama-1", phase="Pending", unschedulable=message, created=created)
    assert situation.says("Ready") == ("False", reason)
    assert situation.plan().look_again == look_again


def test_pods_that_cannot_even_be_created_are_said_with_the_reason():
    quota = 'pods "llama-6d-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1'
    failing = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": quota}
    situation = Situation(ready=0).deployment(available=0, conditions=[failing])
    for kind in ("Ready", "ModelReady", "Available"):
        assert situation.says(kind) == ("False", "ApplyFailed")
    assert situation.conditions()["Ready"]["message"] == f"pods cannot be created: {quota}"
    assert situation.deployment(available=0, conditions=[failing, _late()]).says("Ready") == ("False", "ApplyFailed")
    assert quota in situation.conditions()["Stalled"]["message"]
    assert situation.deployment(available=0, conditions=[]).says("Ready") == ("False", "Loading")


def test_pods_that_cannot_be_created_beyond_the_floor_take_no_readiness_away():
    failing = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}
    situation = Situation(SCALED).deployment(conditions=[failing])
    assert situation.says("Ready") == ("True", "Ready")
    assert situation.says("ModelReady") == ("True", "Loaded")


GONE = "Pod was rejected: Allocate failed due to requested number of devices unavailable for nvidia.com/gpu"


def _rejected(situation, *names, seconds=10, reason="UnexpectedAdmissionError", message=GONE):
    created = f"{START - timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"
    for name in names:
        fields = {"termination_reason": reason, "termination_message": message, "created": created}
        situation.pod(name, phase="Failed", **fields)
    return situation


def test_pods_that_nodes_turn_away_again_and_again_say_why():
    situation = _rejected(Situation(ready=0), "llama-1", "llama-2").pod("llama-3", phase="Pending")
    for kind in ("Ready", "ModelReady", "Available"):
        assert situation.says(kind) == ("False", "InsufficientGPU")
    said = f"nodes turn away pod after pod: UnexpectedAdmissionError: {GONE}"
    assert situation.conditions()["Ready"]["message"] == said
    situation.deployment(available=0, conditions=[_late()])
    assert said in situation.conditions()["Stalled"]["message"]
    other = {"reason": "NodeAffinity", "message": "Predicate NodeAffinity failed"}
    assert _rejected(Situation(ready=0), "llama-1", "llama-2", **other).says("Ready") == ("False", "Unschedulable")


def test_pods_turned_away_once_or_long_ago_or_before_one_was_taken_explain_nothing():
    assert _rejected(Situation(ready=0), "llama-1").says("Ready") == ("False", "Loading")
    assert _rejected(Situation(ready=0), "llama-1", "llama-2", seconds=3600).says("Ready") == ("False", "Loading")
    taken = _rejected(Situation(ready=0), "llama-1", "llama-2").pod(phase="Pending", waiting_reason="PodInitializing")
    assert taken.says("Ready") == ("False", "Loading")
    running = _rejected(Situation(ready=0), "llama-1", "llama-2").pod(phase="Running")
    assert running.says("Ready") == ("False", "Loading")
    assert _rejected(Situation(), "llama-1", "llama-2").says("Ready") == ("True", "Ready")


def test_a_failing_pod_beyond_the_floor_takes_no_readiness_away():
    parts = {"autoscaling": {"maxReplicas": 9, "targetConcurrency": 4}}
    situation = Situation(parts, ready=1).pod("llama-9", unschedulable="Insufficient nvidia.com/gpu")
    assert situation.says("Ready") == ("True", "Ready")


def test_no_progress_in_time_is_stalled_with_what_holds_it_up():
    situation = Situation(ready=0).pod("llama-1", waiting_reason="ErrImagePull", waiting_message="no such image")
    situation.deployment(available=0, conditions=[_late()])
    found = situation.conditions()
    assert (found["Stalled"]["status"], found["Stalled"]["reason"]) == ("True", "ProgressDeadlineExceeded")
    assert "ImagePullFailed: no such image" in found["Stalled"]["message"]
    assert found["Ready"]["reason"] == "ImagePullFailed"
    assert "Reconciling" not in found


def test_a_deadline_that_an_earlier_spec_missed_says_nothing_of_the_one_that_mends_it():
    late = {"conditions": [_late()], "available": 0}
    mended = Situation(ready=0).pod("llama-1").deployment(**late, observed_generation=1, generation=2)
    assert "Stalled" not in mended.conditions()
    assert mended.says("Reconciling") == ("True", "Loading")
    assert mended.says("Ready") == ("False", "RollingOut")
    sent = Situation(ready=0).pod("llama-1").deployment(**late)
    sent.model = model({"model": {"revision": "v2"}}, generation=2)
    assert "Stalled" not in sent.conditions(), "its Deployment has yet to be applied"
    assert sent.says("Reconciling") == ("True", "RollingOut")


def test_reconciling_lasts_from_the_change_until_enough_replicas_serve_it():
    loading = Situation(ready=0).before(("Reconciling", "True", "Pending")).pod("llama-1")
    assert loading.says("Reconciling") == ("True", "Loading")
    rolling = Situation(ready=0).before(("Reconciling", "True", "RollingOut")).pod("llama-1")
    assert rolling.says("Reconciling") == ("True", "RollingOut")
    assert Situation().before(("Reconciling", "True", "RollingOut")).says("Reconciling") is None
    assert Situation(ready=0).before(("Ready", "True", "Ready")).pod("llama-1").says("Reconciling") is None


def test_another_template_of_a_suspended_model_replaces_no_pods():
    situation = Situation({"suspend": True}, ready=0)
    situation.model = model({"suspend": True, "model": {"revision": "v2"}}, generation=2, status=situation.status())
    assert situation.says("Reconciling") is None
    assert situation.plan().events == ()
    situation.pod("llama-1", ready=True)
    assert situation.says("Reconciling") == ("True", "RollingOut")


# -- drafts --------------------------------------------------------------------------------------------------------


def test_a_broken_draft_is_served_plainly_and_said():
    situation = Situation(DRAFTED, did=Did(running=1, fields=BROKEN))
    assert situation.says("DraftReady") == ("False", "TokenizerMismatch")
    assert situation.says("Ready") == ("True", "Ready")
    assert situation.says("SpeculationActive") == ("False", "DraftUnavailable")
    assert situation.status()["speculativeDecoding"]["state"] == "Unavailable"


def test_a_pod_that_says_more_than_a_condition_holds_is_cut_short():
    chatty = Situation(DRAFTED, did=Did(fields={**BROKEN, "draft_message": "missing: " + "layer, " * 8000}))
    message = chatty.conditions()["DraftReady"]["message"]
    assert message.startswith("missing: layer, layer")
    assert len(message) <= 32768


def test_a_broken_draft_breaks_the_promise_of_mode_enabled():
    situation = Situation(DRAFTED, {"speculativeDecoding": {"mode": "Enabled"}}, did=Did(fields=BROKEN))
    assert situation.says("Ready") == ("False", "DraftUnavailable")


def test_a_runtime_that_ended_for_its_draft_says_so():
    words = "DraftUnavailable: mode Enabled needs the draft"
    situation = Situation(DRAFTED, ready=0).pod(exit_code=78, termination_message=words, restarts=1)
    assert situation.says("Ready") == ("False", "DraftUnavailable")
    assert situation.says("DraftReady") == ("False", "DraftUnavailable")


def test_a_draft_is_loaded_when_a_pod_says_so():
    assert Situation(DRAFTED).says("DraftReady") == ("True", "Loaded")
    assert Situation(DRAFTED, ready=0).says("DraftReady") == ("Unknown", "Loading")


def test_a_reason_that_nobody_knows_is_still_an_unavailable_draft():
    broken = {**BROKEN, "draft_reason": "Newfangled"}
    assert Situation(DRAFTED, did=Did(fields=broken)).says("DraftReady") == ("False", "DraftUnavailable")


# -- scaling -------------------------------------------------------------------------------------------------------


SCALED = {"autoscaling": {"minReplicas": 1, "maxReplicas": 9, "targetConcurrency": 4}}
SILENT = Did(answered=False)


def test_scaling_is_active_within_its_target():
    assert Situation(SCALED).says("ScalingActive") == ("True", "WithinTarget")
    assert "spec.replicas is ignored" in Situation(SCALED).conditions()["ScalingActive"]["message"]


@pytest.mark.parametrize(
    ("running", "most", "said", "beyond"),
    [(12, 2, False, True), (8.6, 2, False, False), (8.6, 2, True, True), (7, 2, True, False), (8, 9, True, False)],
    ids=("too much", "within the tolerance", "still too much", "no longer", "more replicas may come"),
)
def test_a_load_that_maxreplicas_cannot_take_is_said_and_does_not_turn_the_message_at_the_edge(
    running, most, said, beyond
):
    """Of two replicas, at four requests each."""
    words = "more requests are in flight than maxReplicas allows for"
    situation = Situation(
        SCALED, {"autoscaling": {"minReplicas": 2, "maxReplicas": most}}, ready=2, did=Did(running / 2)
    )
    situation.before(("ScalingActive", "True", "WithinTarget"))
    situation.model.status["conditions"][0]["message"] = words if said else ""
    assert situation.says("ScalingActive") == ("True", "WithinTarget")
    assert situation.conditions()["ScalingActive"]["message"].endswith(words) is beyond


def test_a_decision_is_told_in_its_own_words():
    situation = Situation(SCALED, did=Did(running=12))
    assert situation.says("ScalingActive") == ("True", "Scaling")
    assert "need 3 replicas at 4 each" in situation.conditions()["ScalingActive"]["message"]


def test_pods_that_do_not_answer_make_scaling_unknown_and_say_why():
    situation = Situation(SCALED, ready=3)
    situation.samples |= {name: samples([SILENT] * 13, first=False) for name in ("llama-1", "llama-2")}
    assert situation.says("ScalingActive") == ("Unknown", "MetricsUnavailable")
    assert situation.says("SpeculationActive") == ("Unknown", "MetricsUnavailable")
    assert "pod llama-1: no answer" in situation.conditions()["ScalingActive"]["message"]


@pytest.mark.parametrize("last", [BUSY, SILENT], ids=("answered", "crashed"))
def test_a_pod_that_has_just_become_ready_again_was_not_asked_yet_and_is_not_silent(last):
    situation = Situation(SCALED).before(("ScalingActive", "Unknown", "Pending"))
    before = Fleet(gone={"llama-0": samples([BUSY] * 10 + [last])})
    situation.fields = {"fleet": before, "now": 120.0}
    assert situation.says("ScalingActive") == ("Unknown", "Pending")
    assert situation.says("SpeculationActive") != ("Unknown", "MetricsUnavailable")


def test_a_foreign_owner_of_replicas_is_named():
    situation = Situation(SCALED)
    fields = [
        {"manager": "outrider-operator", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        {"manager": "kubectl", "fieldsV1": {"f:metadata": {}}},
        {"manager": "hpa", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
    ]
    body = merged(situation.children["Deployment"].body, {"metadata": {"managedFields": fields}})
    situation.children["Deployment"] = replace(situation.children["Deployment"], body=body)
    assert situation.says("ScalingActive") == ("False", "ReplicasOwnedElsewhere")
    assert situation.conditions()["ScalingActive"]["message"].startswith("hpa ")


def test_our_own_repairs_are_no_foreign_owner():
    situation = Situation(SCALED)
    fields = [
        {"manager": manager, "fieldsV1": {"f:spec": {"f:replicas": {}}}}
        for manager in (labels.FIELD_MANAGER, labels.REPAIR_MANAGER)
    ]
    body = merged(situation.children["Deployment"].body, {"metadata": {"managedFields": fields}})
    situation.children["Deployment"] = replace(situation.children["Deployment"], body=body)
    assert situation.says("ScalingActive") == ("True", "WithinTarget")


# -- speculation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "did", "says"),
    [
        ({}, Did(running=1), ("True", "Drafting")),
        ({}, Did(running=1, drafting=False), ("False", "NoGain")),
        ({}, Did(running=1, length=0.02), ("False", "NoGain")),
        ({}, Did(running=0), ("Unknown", "NoTraffic")),
        ({"mode": "Disabled"}, Did(running=1), ("False", "DisabledBySpec")),
        ({"mode": "Enabled"}, Did(running=1), ("True", "Drafting")),
        ({"saturation": {"disableAtConcurrency": 4}}, Did(running=4), ("False", "Saturated")),
    ],
    ids=str,
)
def test_speculation_is_active_while_tokens_are_drafted(parts, did, says):
    assert Situation({"speculativeDecoding": parts}, did=did).says("SpeculationActive") == says


@pytest.mark.parametrize(
    ("length", "before", "reason"),
    [
        (0.11, "NoGain", "Drafting"),
        (0.08, "NoGain", "NoGain"),
        (0.08, "Drafting", "Drafting"),
        (0.04, "Drafting", "NoGain"),
    ],
)
def test_what_is_drafted_hardly_ever_does_not_turn_the_condition_back_and_forth(length, before, reason):
    said = ("SpeculationActive", "True" if before == "Drafting" else "False", before)
    assert Situation(did=Did(running=1, length=length)).before(said).says("SpeculationActive")[1] == reason


@pytest.mark.parametrize(("trial", "when"), [("", "at 2026-01-01T00:01:00Z"), ("llama-0", "now on pod llama-0")])
def test_a_measured_threshold_says_so_and_when_it_is_measured_again(trial, when):
    situation = Situation({}, did=Did(running=9, fields={"break_even_concurrency": 8}))
    due = START.timestamp() + (0 if trial else 60)
    situation.remembering(state="Suspended", reason="Saturated", disable_at=8.0, remeasure_at=due)
    assert situation.says("SpeculationActive") == ("False", "Saturated")
    message = situation.conditions()["SpeculationActive"]["message"]
    assert message.endswith(f"at 8 running requests per replica, as replicas measured it; measured anew {when}")


def test_low_acceptance_says_what_it_waits_for():
    situation = Situation({"speculativeDecoding": {"minAcceptancePercent": 40}}, did=Did(running=9, acceptance=0.1))
    situation.remembering(since=1.0)
    assert situation.says("SpeculationActive") == ("False", "LowAcceptance")
    message = situation.conditions()["SpeculationActive"]["message"]
    assert message == (
        "fewer than 40 % of the drafted tokens were accepted (once); "
        f"tried again at {START + timedelta(seconds=60):%Y-%m-%dT%H:%M:%SZ}"
    )
    situation.remembering(attempts=3, retry_at=1.0, trial="llama-0")
    situation.samples = {"llama-0": samples([Did()] * 13)}
    message = situation.conditions()["SpeculationActive"]["message"]
    assert message.endswith("(3 times in a row); being tried again on pod llama-0")


def test_a_suspension_that_nobody_can_look_at_again_does_not_blame_the_load():
    situation = Situation({"speculativeDecoding": {"saturation": {"disableAtConcurrency": 4}}}, did=Did(running=9))
    situation.remembering(state="Suspended", reason="Saturated", disable_at=4.0)
    assert situation.says("SpeculationActive") == ("False", "Saturated")
    situation.samples = {"llama-0": samples([SILENT] * 13, first=False)}
    assert situation.says("SpeculationActive") == ("Unknown", "MetricsUnavailable")
    assert situation.status()["speculativeDecoding"]["state"] == "Suspended"


# -- times and restarts --------------------------------------------------------------------------------------------


def test_a_transition_time_stays_while_the_status_does_and_moves_when_it_turns():
    same = Situation().before(("Ready", "True", "Suspended")).conditions()["Ready"]
    turned = Situation().before(("Ready", "False", "Loading")).conditions()["Ready"]
    assert same["lastTransitionTime"] == "then"
    assert turned["lastTransitionTime"] == START.strftime("%Y-%m-%dT%H:%M:%SZ")


def test_what_an_operator_cannot_know_after_its_restart_stays_as_it_was_said():
    said = [
        ("DraftReady", "False", "TokenizerMismatch"),
        ("ScalingActive", "True", "WithinTarget"),
        ("SpeculationActive", "True", "Drafting"),
    ]
    situation = Situation(DRAFTED).before(*said)
    situation.samples = {}
    for kind, value, reason in said:
        assert situation.says(kind) == (value, reason)
        assert situation.conditions()[kind]["lastTransitionTime"] == "then"
    situation.model = replace(situation.model, generation=2)
    assert situation.says("DraftReady") == ("Unknown", "Pending")


def test_a_lull_right_after_a_restart_is_no_proof_of_no_traffic():
    situation = Situation(did=Did(), periods=3).before(("SpeculationActive", "True", "Drafting"))
    assert situation.says("SpeculationActive") == ("True", "Drafting")
    assert Situation(did=Did()).before(("SpeculationActive", "True", "Drafting")).says("SpeculationActive") == (
        "Unknown",
        "NoTraffic",
    )


def test_requests_that_draft_nothing_after_no_traffic_are_said_at_once():
    found = Situation(did=Did(running=1, drafting=False), periods=2)
    found.before(("SpeculationActive", "Unknown", "NoTraffic"))
    assert found.says("SpeculationActive") == ("False", "NoGain")


def test_a_status_of_another_version_is_read_as_far_as_it_is_known():
    situation = Situation(DRAFTED).before(("DraftReady", "Maybe", "Newfangled"))
    situation.samples = {}
    assert situation.says("DraftReady") == (Status.UNKNOWN, Reason.PENDING)
