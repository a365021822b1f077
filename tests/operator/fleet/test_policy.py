"""The operator writes policies the contract's way, and remembers across restarts and versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider_operator.api.reasons import SpeculationState
from outrider_operator.fleet.policy import Memory, Policy

CONTRACT = Path(__file__).parents[2] / "contract" / "speculation"


def test_a_policy_has_the_fields_of_the_contract():
    body = json.loads((CONTRACT / "put-suspended.json").read_text())["request"]["body"]
    ours = Policy("Auto", SpeculationState.SUSPENDED, "Saturated", 4, None, revision="c41b9e07")
    assert ours.to_json() == body


def test_equal_content_has_equal_revision_and_another_content_another():
    policy = Policy("Auto", SpeculationState.ACTIVE, "", 4, None)
    assert policy.sealed() == policy.sealed().sealed()
    assert policy.sealed().revision != Policy("Auto", SpeculationState.ACTIVE, "", 5, None).sealed().revision


def test_memory_of_another_version_is_read_as_far_as_it_is_known():
    memory = Memory(SpeculationState.SUSPENDED, "Saturated", since=1.5)
    assert Memory.from_json(json.loads(json.dumps(memory.to_json())) | {"later": 1}) == memory
    assert Memory.from_json({}) == Memory()


@pytest.mark.parametrize(
    "broken",
    [{"state": "Odd"}, {"since": "soon"}, {"retry_at": float("nan")}, {"retry_at": 1e300}, {"disable_at": -1}],
    ids=str,
)
def test_a_memory_that_somebody_broke_is_told_apart(broken):
    with pytest.raises((ValueError, TypeError)):
        Memory.from_json(broken)
