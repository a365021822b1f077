"""The operator's loop on a real pod: speculation off under load, and on again; what a user changes reaches the pod."""

from __future__ import annotations

import pytest
from tests.e2e.site import NAME, NGRAM, PATIENCE, Site, poll, ready, restarts

from demo import chat
from demo.kubectl import condition
from demo.load import COPYING, Load
from demo.story import speculation

pytestmark = [pytest.mark.node, pytest.mark.timeout(PATIENCE)]


def test_speculation_that_pays_is_suspended_under_load_and_resumes_after_it(site: Site) -> None:
    """N-grams on prompts to copy from pay on a CPU, so in mode Auto they are what is drafted."""
    site.apply("copier", sample=NGRAM)
    site.until("copier is Ready", ready, name="copier")
    pods = site.pods("copier")
    with site.client("copier") as service:
        before = chat.ask(service, "copier", chat.COPYING, max_tokens=32)
        with Load(service, "copier", concurrency=8, questions=COPYING) as load:
            suspended = site.until("Suspended", lambda obj: speculation(obj)[0] == "Suspended", name="copier")
            poll("told", lambda: _effective(site, pods[0], "Suspended"))
            under_load = chat.ask(service, "copier", chat.COPYING, max_tokens=32)
        site.until("Active again", lambda obj: speculation(obj)[0] == "Active", name="copier")
        poll("told", lambda: _effective(site, pods[0], "Active"))
        after = chat.ask(service, "copier", chat.COPYING, max_tokens=32)

    assert speculation(suspended) == ("Suspended", "Saturated")
    assert condition(suspended, "SpeculationActive")["reason"] == "Saturated"
    assert condition(suspended, "Ready")["status"] == "True"  # saturation takes nothing out of service
    assert (under_load.drafted, under_load.text) == (0, before.text)
    assert before.drafted > 0 < after.drafted
    assert after.text == before.text
    assert set(load.outcomes) <= {"answered"}, "no stream broke"
    assert [each["metadata"]["uid"] for each in site.pods("copier")] == [pods[0]["metadata"]["uid"]]
    assert restarts(site.pods("copier")) == 0
    told = [reason for reason in site.events("copier") if reason.startswith("Speculation")]
    assert told == ["SpeculationSuspended", "SpeculationResumed"]
    site.kubectl("delete", "specm", "copier", "--wait=false")


def test_mode_and_draft_length_are_changed_under_a_running_stream(served: Site) -> None:
    (pod,) = served.pods(NAME)
    with served.client() as service, Load(service, NAME, concurrency=1, max_tokens=1000) as load:
        served.patch(NAME, numSpeculativeTokens=2)
        poll("two tokens", lambda: _policy(served, pod, numSpeculativeTokens=2))
        served.patch(NAME, mode="Disabled")
        poll("disabled", lambda: _policy(served, pod, mode="Disabled", state="Disabled"))
        assert chat.ask(service, NAME, chat.QUESTION, max_tokens=4).drafted == 0
    assert set(load.outcomes) <= {"answered"}
    (same,) = served.pods(NAME)
    assert (same["metadata"]["uid"], restarts([same])) == (pod["metadata"]["uid"], restarts([pod]))


def _effective(site: Site, pod: dict, state: str) -> tuple[bool | None, str]:
    effective = site.speculation_of(pod)["effective"]
    drafts = effective["tokens"] > 0
    right = effective["state"] == state and (state == "Active" or not drafts)
    return (True if right else None), str(effective)


def _policy(site: Site, pod: dict, **wanted: object) -> tuple[bool | None, str]:
    policy = site.speculation_of(pod)["policy"]
    return (True if wanted.items() <= policy.items() else None), str(policy)
