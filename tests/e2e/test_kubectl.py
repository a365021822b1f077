"""What a Kubernetes user types, and expects to see."""

from __future__ import annotations

from typing import Any

import pytest
from tests.e2e.site import NAME, PATIENCE, Site, poll, ready

from demo.kubectl import condition
from demo.steps import StepError

pytestmark = [pytest.mark.node, pytest.mark.timeout(PATIENCE)]


def test_get_shows_at_a_glance_what_is_served(served: Site) -> None:
    header, row = served.kubectl("get", "specm", NAME).splitlines()
    assert header.split() == [
        "NAME", "READY", "REASON", "DESIRED", "AVAILABLE", "SPECULATION", "ACCEPT%", "SPEEDUP", "AGE",
    ]  # fmt: skip
    assert row.split()[:2] == [NAME, "True"]
    assert "Active" in row
    wide = served.kubectl("get", "outrider", "--output", "wide").splitlines()[0]
    assert {"MODEL", "METHOD", "DRAFT", "RUNNING", "URL"} <= set(wide.split())


def test_describe_tells_conditions_and_events(served: Site) -> None:
    text = served.kubectl("describe", "specm", NAME)
    for word in ("Accepted", "ModelReady", "DraftReady", "SpeculationActive", "ModelLoaded"):
        assert word in text


def test_explain_documents_the_fields(site: Site) -> None:
    text = site.kubectl("explain", "specm.spec.speculativeDecoding")
    for word in ("numSpeculativeTokens", "minAcceptancePercent", "saturation", "DraftModel, NGram"):
        assert word in text


def test_an_invalid_object_is_refused_with_the_field_and_the_fix(site: Site) -> None:
    def without_draft(spec: dict[str, Any]) -> None:
        spec["speculativeDecoding"] = {"method": "DraftModel"}

    with pytest.raises(StepError, match=r"draft is required with methods DraftModel, .*: set draft\.uri"):
        site.apply("wrong", without_draft)
    with pytest.raises(StepError, match=r"spec\.speculation: field not declared"):
        site.apply("wrong", lambda spec: spec.update(speculation={}))


def test_suspend_takes_the_pods_and_keeps_the_object_and_its_service(served: Site) -> None:
    served.apply(NAME, lambda spec: spec.update(suspend=True))
    obj = served.until("suspended", lambda obj: condition(obj, "Ready").get("reason") == "Suspended")
    assert ready(obj)
    poll("no pod", lambda: (True if not served.pods(NAME) else None, "pods remain"))
    assert served.kubectl.get("service", NAME)
    served.apply(NAME)
    served.until("Ready again", lambda obj: ready(obj) and obj["status"]["readyReplicas"] == 1)


def test_delete_leaves_nothing_behind(site: Site) -> None:
    kinds = "deployment,replicaset,pod,service,configmap,secret,poddisruptionbudget,pvc"
    selector = "outrider.dev/model=short-lived"
    site.apply("short-lived", lambda spec: spec.update(suspend=True))
    site.until("accepted", lambda obj: bool(site.kubectl.items("service", "--selector", selector)), name="short-lived")
    assert len(site.kubectl.items(kinds, "--selector", selector)) >= 4
    site.kubectl("delete", "specm", "short-lived", "--timeout=90s")
    poll(
        "children gone",
        lambda: (
            True if not (left := site.kubectl.items(kinds, "--selector", selector)) else None,
            f"{len(left)} left",
        ),
    )
