"""The operator's loop on a real pod: speculation off under load, and on again."""

from __future__ import annotations

import pytest
from tests.e2e.site import NAME, PATIENCE, Site

from demo import chat
from demo.kubectl import condition
from demo.load import Load
from demo.story import speculation

pytestmark = [pytest.mark.node, pytest.mark.timeout(PATIENCE)]


def test_speculation_is_suspended_under_load_and_resumes_after_it(served: Site) -> None:
    (pod,) = served.pods(NAME)
    with served.client() as service:
        before = chat.ask(service, NAME, chat.QUESTION, max_tokens=24)
        with Load(service, NAME, concurrency=8) as load:
            suspended = served.until("Suspended, Saturated", lambda obj: speculation(obj) == ("Suspended", "Saturated"))
            under_load = chat.ask(service, NAME, chat.QUESTION, max_tokens=24)
        served.until("Active again", lambda obj: speculation(obj)[0] == "Active")
        after = chat.ask(service, NAME, chat.QUESTION, max_tokens=24)

    assert condition(suspended, "SpeculationActive")["reason"] == "Saturated"
    assert condition(suspended, "Ready")["status"] == "True"  # saturation takes nothing out of service
    assert (under_load.drafted, under_load.text) == (0, before.text)
    assert after.drafted > 0
    assert after.text == before.text
    assert set(load.outcomes) <= {"answered"}
    (same,) = served.pods(NAME)
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]  # toggling restarts nothing
    assert same["status"]["containerStatuses"][0]["restartCount"] == 0
    events = {e["reason"] for e in served.kubectl.items("events") if e["involvedObject"]["name"] == NAME}
    assert {"SpeculationSuspended", "SpeculationResumed"} <= events
