"""More than one replica on the node: scaling out after speculation is off, and replacing pods under load."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from tests.e2e.site import NGRAM, PATIENCE, Site, poll, ready, restarts

from demo import chat
from demo.load import COPYING, Load
from demo.story import speculation

pytestmark = [pytest.mark.node, pytest.mark.soak, pytest.mark.timeout(2 * PATIENCE)]

WINDOW = 5  # seconds, of the sample's saturation


def test_load_turns_speculation_off_before_it_adds_a_replica_and_calm_undoes_both(site: Site) -> None:
    def scaled(spec: dict[str, Any]) -> None:
        spec["autoscaling"] = {"minReplicas": 1, "maxReplicas": 2, "targetConcurrency": 6, "scaleDownWindowSeconds": 20}

    site.apply("rush", scaled, NGRAM)
    site.until("Ready", ready, name="rush")
    (pod,) = site.pods("rush")
    with site.client("rush") as service, Load(service, "rush", concurrency=10, questions=COPYING) as load:
        poll("load", lambda: (datetime.now().astimezone() if site.speculation_of(pod)["running"] >= 4 else None, ""))
        loaded = datetime.now().astimezone()
        obj = site.until("Suspended", lambda obj: speculation(obj) == ("Suspended", "Saturated"), name="rush")
        site.until("two replicas", lambda obj: obj["status"]["readyReplicas"] == 2, name="rush")
        # a new threshold takes effect on what runs already
        site.patch("rush", saturation={"disableAtConcurrency": 100, "enableAtConcurrency": None})
        site.until("Active under the same load", lambda obj: speculation(obj)[0] == "Active", name="rush")
        site.patch("rush", saturation={"disableAtConcurrency": 3, "enableAtConcurrency": 2})
        site.until("Suspended again", lambda obj: speculation(obj)[0] == "Suspended", name="rush")
    site.until("Active", lambda obj: speculation(obj)[0] == "Active", name="rush")
    calm = site.until("one replica", lambda obj: obj["status"]["desiredReplicas"] == 1, name="rush")

    turned = datetime.fromisoformat(obj["status"]["speculativeDecoding"]["lastTransitionTime"])
    assert (turned - loaded).total_seconds() <= WINDOW + 10
    assert set(load.outcomes) <= {"answered"}, "no stream broke"
    assert restarts([each for each in site.pods("rush") if each["metadata"]["uid"] == pod["metadata"]["uid"]]) == 0
    told = [reason for reason in site.events("rush") if reason.startswith(("Speculation", "Scaled"))]
    assert told[:2] == ["SpeculationSuspended", "ScaledUp"], "what is free comes first"
    steps = [(each["from"], each["to"]) for each in calm["status"]["autoscaling"]["recentDecisions"]]
    assert steps == [(1, 2), (2, 1)]
    site.kubectl("delete", "specm", "rush", "--wait=false")


def test_another_draft_replaces_both_pods_while_requests_are_answered(site: Site) -> None:
    def two(spec: dict[str, Any]) -> None:
        spec["replicas"] = 2
        spec["rollout"] = {"drainTimeoutSeconds": 60}  # streams of a leaving pod end by themselves, however slowly

    def another(spec: dict[str, Any]) -> None:
        two(spec)
        spec["speculativeDecoding"]["draft"]["uri"] = spec["model"]["uri"]  # the target itself: always right

    site.apply("pair", two)
    site.until("two replicas", lambda obj: ready(obj) and obj["status"]["readyReplicas"] == 2, name="pair")
    before = {each["metadata"]["uid"] for each in site.pods("pair")}
    with site.client("pair") as service, Load(service, "pair", concurrency=2, max_tokens=8) as load:
        site.apply("pair", another)
        site.until("taken over", lambda obj: not ready(obj), name="pair")
        site.until("Ready again", ready, name="pair")
    assert not before & {each["metadata"]["uid"] for each in site.pods("pair") if _stays(each)}
    assert set(load.outcomes) == {"answered"}
    with site.client("pair") as service:
        answer = chat.ask(service, "pair", chat.QUESTION, max_tokens=24)
    assert answer.accepted == answer.drafted > 0
    site.kubectl("delete", "specm", "pair", "--wait=false")


def _stays(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" not in pod["metadata"]
