"""The policy is parsed as the contract says, and reduced to a draft length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider_runtime.speculation.policy import Policy, PolicyError, parse_policy

EXCHANGES = {
    path.stem: json.loads(path.read_text())
    for path in (Path(__file__).parents[2] / "contract" / "speculation").glob("put-*.json")
}


@pytest.mark.parametrize("name", [n for n, e in EXCHANGES.items() if e["response"]["status"] == 200])
def test_every_policy_of_the_contract_survives_a_round_trip(name):
    body = EXCHANGES[name]["request"]["body"]
    assert parse_policy(body).to_json() == body


@pytest.mark.parametrize("name", [n for n, e in EXCHANGES.items() if e["response"]["status"] == 400])
def test_every_bad_policy_of_the_contract_is_refused_in_its_words(name):
    with pytest.raises(PolicyError) as caught:
        parse_policy(EXCHANGES[name]["request"]["body"])
    assert {"field": caught.value.field, "message": caught.value.message} == EXCHANGES[name]["response"]["body"][
        "error"
    ]


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [
        (Policy(), 4),
        (Policy(num_speculative_tokens=16), 8),
        (Policy(state="Suspended"), 0),
        (Policy(mode="Disabled", state="Disabled"), 0),
        (Policy(mode="Enabled", num_speculative_tokens=2), 2),
    ],
)
def test_a_runtime_started_for_eight_tokens_may_draft(policy, allowed):
    assert policy.allowed_tokens(8) == allowed
