"""One event for each transition, and none for standing still."""

from __future__ import annotations

import pytest

from outrider_operator.transitions import transitions


def _status(state="Active", **conditions):
    said = [
        {"type": kind, "status": status, "reason": reason, "message": f"about {reason}"}
        for kind, (status, reason) in conditions.items()
    ]
    return {"conditions": said, "speculativeDecoding": {"state": state}}


READY = {"Ready": ("True", "Ready"), "Accepted": ("True", "Accepted")}
ROLLING = {"Ready": ("False", "RollingOut"), "Reconciling": ("True", "RollingOut")}


@pytest.mark.parametrize(
    ("old", "new", "events"),
    [
        ({}, _status(), []),
        (_status(**READY), _status(**READY), []),
        (_status("Active"), _status("Suspended"), ["SpeculationSuspended"]),
        (_status("Suspended"), _status("Active"), ["SpeculationResumed"]),
        (_status("Suspended"), _status("Suspended"), []),
        (_status("Suspended"), _status("Disabled"), []),
        ({}, _status("Suspended"), []),
        (_status(ModelReady=("Unknown", "Loading")), _status(ModelReady=("True", "Loaded")), ["ModelLoaded"]),
        (_status(**READY), _status(**ROLLING), ["RolloutStarted"]),
        (_status(**ROLLING), _status(**READY), ["RolloutComplete"]),
        (_status(**ROLLING), _status(**ROLLING), []),
        (_status(**ROLLING), _status(Ready=("False", "InvalidSpec")), []),
        (_status(DraftReady=("True", "Loaded")), _status(DraftReady=("False", "OutOfMemory")), ["DraftRejected"]),
        ({}, _status(Accepted=("False", "NameConflict")), ["Refused"]),
        (_status(Accepted=("False", "InvalidSpec")), _status(Accepted=("False", "InvalidSpec")), []),
        (_status(Accepted=("False", "InvalidSpec")), _status(Accepted=("False", "NameConflict")), ["Refused"]),
        (_status(Ready=("False", "Loading")), _status(Ready=("False", "CrashLooping")), ["PodFailed"]),
        (_status(Ready=("False", "CrashLooping")), _status(Ready=("False", "CrashLooping")), []),
        (_status(Ready=("False", "Unschedulable")), _status(Ready=("False", "CrashLooping")), ["PodFailed"]),
        (_status(Ready=("False", "CrashLooping")), _status(**READY), []),
        (_status(**READY), _status(Ready=("False", "ApplyFailed"), Accepted=("True", "Accepted")), ["PodFailed"]),
        (_status(**READY), _status(Ready=("False", "ApplyFailed"), Accepted=("False", "ApplyFailed")), ["Refused"]),
        (
            _status(),
            _status(Ready=("False", "OutOfMemory"), ModelReady=("False", "OutOfMemory")),
            ["PodFailed"],
        ),
    ],
    ids=str,
)
def test_each_transition_is_said_once(old, new, events):
    assert [reason for reason, _ in transitions(old, new)] == events


def test_an_event_says_why():
    old, new = _status(), _status("Suspended", SpeculationActive=("False", "Saturated"))
    new["speculativeDecoding"]["reason"] = "Saturated"
    assert transitions(old, new)[0][1] == "Saturated: about Saturated"


def test_a_suspension_is_told_by_its_own_reason_though_pods_fell_silent_before_it_was():
    """The status of the decision could not be written, and by now the condition says that nobody can be measured."""
    new = _status("Suspended", SpeculationActive=("Unknown", "MetricsUnavailable"))
    new["speculativeDecoding"]["reason"] = "Saturated"
    [(reason, words)] = transitions(_status(), new)
    assert reason == "SpeculationSuspended"
    assert words.startswith("Saturated: ")
    assert "MetricsUnavailable" not in words
