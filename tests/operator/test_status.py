"""The whole status object: complete, valid, and equal again while nothing worth a write changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.build import DEFAULTS, DRAFTED, START, Cluster, Did, model, observed, pod, samples

from outrider_operator.api.v1alpha1 import SpeculativeModelStatus
from outrider_operator.fleet.samples import Fleet
from outrider_operator.plan import Scaling, plan
from outrider_operator.status import differs, status

THEN = "2025-12-31T23:00:00Z"


def _status(*parts, old=None, did=None, periods=13, written=None, generation=1, template="", ready=True):
    """Status of a model with one pod that did `did` all the time."""
    target = model(*parts, status=old or {}, generation=generation)
    fleet = Fleet({"llama-1": samples([did] * periods)}) if did else Fleet()
    seen = observed(
        model=target,
        pods=(pod("llama-1", ready=ready, template=template or _template(target)),),
        fleet=fleet,
        now=5.0 * periods,
        status_written_at=written,
    )
    result = status(seen, plan(seen, DEFAULTS))
    SpeculativeModelStatus.model_validate(result)
    return result


def _template(target):
    [deployment] = [c for c in plan(observed(model=target), DEFAULTS).children if c["kind"] == "Deployment"]
    return deployment["spec"]["template"]["metadata"]["labels"]["outrider.dev/template"]


def _speculation(**old):
    return {
        "observedGeneration": 1,
        "speculativeDecoding": {"state": "Active", "lastTransitionTime": THEN, **old},
    }


def test_the_first_status_has_what_scale_and_clients_need():
    seen = observed({"replicas": 3})
    found = status(seen, plan(seen, DEFAULTS))
    assert found["observedGeneration"] == 1
    assert found["selector"] == "outrider.dev/model=llama"
    assert found["url"] == "http://llama.team.svc"
    assert (found["replicas"], found["readyReplicas"], found["desiredReplicas"]) == (0, 0, 3)
    assert found["speculativeDecoding"]["state"] == "Active"
    assert "autoscaling" not in found
    SpeculativeModelStatus.model_validate(found)


def test_a_refused_spec_still_says_what_runs():
    cluster = Cluster(model({"replicas": 2}))
    cluster.reconcile()
    cluster.run(60, load=2)
    cluster.edit({"engine": {"tensorParallelSize": 2}})
    cluster.run(5)
    found = cluster.model.status
    assert found["observedGeneration"] == 2
    assert (found["replicas"], found["readyReplicas"], found["desiredReplicas"]) == (2, 2, 2)
    assert found["speculativeDecoding"]["state"] == "Active"


def test_the_numbers_are_rounded_and_as_the_pods_measured():
    fields = {"speedup": 2.314, "break_even_concurrency": 24}
    found = _status(did=Did(running=2.96, acceptance=0.713, length=2.6, fields=fields))["speculativeDecoding"]
    assert found["runningConcurrency"] == "3.0"
    assert found["acceptancePercent"] == 71
    assert found["acceptedLength"] == "2.9"
    assert found["speedup"] == "2.31"
    assert found["breakEvenConcurrency"] == 24
    assert found["effectiveTokens"] == "2.6"


def test_while_suspended_decoding_is_plain_whatever_the_last_minute_was_like():
    saturation = {"saturation": {"disableAtConcurrency": 4}}
    found = _status({"speculativeDecoding": saturation}, did=Did(running=9, fields={"speedup": 1.93}))
    speculation = found["speculativeDecoding"]
    assert (speculation["state"], speculation["effectiveTokens"], speculation["speedup"]) == (
        "Suspended",
        "0.0",
        "1.00",
    )


def test_what_pods_said_while_suspended_is_not_said_of_them_once_they_may_draft():
    old = _speculation(state="Suspended", speedup="1.00")
    found = _status(old=old, did=Did(running=1, fields={"speedup": 1.0, "state": "Suspended"}))
    assert found["speculativeDecoding"]["state"] == "Active"
    assert "speedup" not in found["speculativeDecoding"]


def test_what_was_loaded_is_told_by_the_pods_of_the_current_template():
    found = _status(DRAFTED, did=Did())
    assert found["model"] == {"resolvedRevision": "5e2f", "parameters": 134515008, "dtype": "Float32"}
    assert found["draft"] == {"parameters": 1000}
    old = _status(DRAFTED, did=Did(), template="old")
    assert "model" not in old
    assert "draft" not in old


def test_what_was_loaded_stays_until_the_spec_changes():
    old = {"observedGeneration": 1, "model": {"dtype": "Float32"}}
    assert _status(old=old)["model"] == {"dtype": "Float32"}
    assert "model" not in _status(old=old, generation=2)


def test_a_refused_draft_has_nothing_loaded():
    broken = {"draft_ok": False, "draft_reason": "TokenizerMismatch", "draft_message": "no"}
    found = _status(DRAFTED, did=Did(fields=broken), old={"observedGeneration": 1, "draft": {"parameters": 1}})
    assert "draft" not in found
    assert found["speculativeDecoding"]["state"] == "Unavailable"
    assert found["speculativeDecoding"]["reason"] == "DraftUnavailable"


def test_a_broken_draft_stays_unavailable_while_nobody_was_asked_again():
    old = _speculation(state="Unavailable", reason="DraftUnavailable")
    assert _status(DRAFTED, old=old)["speculativeDecoding"]["state"] == "Unavailable"
    assert _status(DRAFTED, old=old, did=Did())["speculativeDecoding"]["state"] == "Active"


@pytest.mark.parametrize(
    ("old", "written", "running", "shown"),
    [
        ("3.0", None, 3.4, "3.0"),
        ("3.0", None, 3.5, "3.5"),
        ("3.0", 10.0, 3.5, "3.0"),
        ("3.0", 5.0, 3.5, "3.5"),
        ("100.0", None, 109.0, "100.0"),
        ("100.0", None, 110.0, "110.0"),
        ("0.2", None, 0.0, "0.0"),
        ("0.0", None, 0.2, "0.2"),
        ("odd", None, 3.0, "3.0"),
    ],
    ids=(
        "immaterial",
        "material",
        "written within the minute",
        "written a minute ago",
        "noise of a large number",
        "more than noise",
        "coming to rest",
        "starting",
        "not ours",
    ),
)
def test_numbers_move_when_it_matters_and_at_most_once_a_minute(old, written, running, shown):
    numbers = _status(did=Did(running=3.0))["speculativeDecoding"] | {"runningConcurrency": old}
    before = {"observedGeneration": 1, "speculativeDecoding": numbers}
    found = _status(old=before, did=Did(running=running), written=written)
    assert found["speculativeDecoding"]["runningConcurrency"] == shown


def test_a_number_appears_at_once():
    found = _status(old=_speculation(), did=Did(running=1), written=64.0)["speculativeDecoding"]
    assert found["acceptancePercent"] == 60


def test_a_turn_of_speculation_brings_its_numbers_along():
    saturated = {"speculativeDecoding": {"saturation": {"disableAtConcurrency": 4}}}
    old = _speculation(effectiveTokens="4.0", runningConcurrency="1.0")
    found = _status(saturated, old=old, did=Did(running=9), written=64.0)["speculativeDecoding"]
    assert found["state"] == "Suspended"
    assert found["reason"] == "Saturated"
    assert found["effectiveTokens"] == "0.0"
    assert found["runningConcurrency"] == "9.0"
    assert found["lastTransitionTime"] == START.strftime("%Y-%m-%dT%H:%M:%SZ")


def test_numbers_of_the_last_traffic_stay_while_there_is_none():
    old = _speculation(acceptancePercent=71, acceptedLength="3.3", effectiveTokens="2.6", runningConcurrency="3.0")
    found = _status(old=old, did=Did(running=0))["speculativeDecoding"]
    assert found["acceptancePercent"] == 71
    assert found["runningConcurrency"] == "0.0"
    assert found["lastTransitionTime"] == THEN


def test_without_a_ready_replica_there_are_no_numbers():
    old = _speculation(acceptancePercent=71, runningConcurrency="3.0")
    found = _status(old=old, ready=False)["speculativeDecoding"]
    assert found == {"state": "Active", "method": "NGram", "lastTransitionTime": THEN}


def test_a_speedup_that_the_runtimes_no_longer_claim_goes():
    old = _speculation(speedup="1.50", breakEvenConcurrency=9)
    found = _status(old=old, did=Did())["speculativeDecoding"]
    assert "speedup" not in found
    assert "breakEvenConcurrency" not in found
    assert _status(old=old)["speculativeDecoding"]["speedup"] == "1.50"


def test_scaling_decisions_are_remembered_five_deep_and_with_their_reasons():
    decisions = [{"time": THEN, "from": n, "to": n + 1, "reason": "before"} for n in range(1, 6)]
    old = {"autoscaling": {"lastScaleTime": THEN, "recentDecisions": decisions}}
    seen = observed(DRAFTED, model=model(DRAFTED, status=old))
    planned = replace(plan(seen, DEFAULTS), scaling=Scaling(6, 8, "load"))
    found = status(seen, planned)["autoscaling"]
    assert len(found["recentDecisions"]) == 5
    assert found["recentDecisions"][-1] == {"time": found["lastScaleTime"], "from": 6, "to": 8, "reason": "load"}
    assert found["recentDecisions"][0]["from"] == 2
    again = status(observed(DRAFTED, model=model(DRAFTED, status={"autoscaling": found})), planned)["autoscaling"]
    assert [d["to"] for d in again["recentDecisions"]] == [d["to"] for d in found["recentDecisions"]]


def test_decisions_go_with_autoscaling_itself():
    old = {"autoscaling": {"lastScaleTime": THEN, "recentDecisions": []}}
    assert "autoscaling" not in _status(old=old)


def test_equal_is_not_worth_a_write():
    seen = observed()
    found = status(seen, plan(seen, DEFAULTS))
    again = replace(seen, model=replace(seen.model, status=found), wall=START.replace(year=2027), now=99999.0)
    assert not differs(status(again, plan(again, DEFAULTS)), found)
    assert differs({**found, "replicas": 1}, found)


def test_a_condition_that_somebody_else_keeps_in_the_status_is_no_reason_to_write():
    seen = observed()
    found = status(seen, plan(seen, DEFAULTS))
    theirs = {"type": "example.com/Audited", "status": "True", "reason": "Seen", "lastTransitionTime": "then"}
    mixed = {**found, "conditions": [theirs, *found["conditions"]]}
    assert not differs(found, mixed)
    assert differs({**found, "conditions": found["conditions"][1:]}, mixed)
    assert differs(found, {"observedGeneration": -1})


@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.tuples(st.floats(0, 30), st.floats(0, 1)), min_size=20, max_size=40),
)
def test_a_noisy_steady_load_is_written_about_at_most_once_a_minute(noise):
    """Only the condition of speculation may turn in between; moving numbers alone may not cause a write."""
    histories = samples([Did(running=running, acceptance=share) for running, share in noise])
    seen = observed(pods=(pod("llama-1", ready=True, template=_template(model())),))
    old, written, writes = {}, None, []
    for length in range(2, len(histories)):
        now = histories[length - 1].at
        at = replace(
            seen,
            model=replace(seen.model, status=old),
            fleet=Fleet({"llama-1": histories[:length]}),
            now=now,
            status_written_at=written,
        )
        new = status(at, plan(at, DEFAULTS))
        if differs(new, old):
            turned = new["conditions"] != old.get("conditions")
            appeared = set(new["speculativeDecoding"]) != set(old.get("speculativeDecoding", ()))
            assert turned or appeared or written is None or now - written >= 60
            old, written = new, now
            writes.append(now)
    assert writes
