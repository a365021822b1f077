"""A pod's answer is checked against the contract before anything is decided by it."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_operator.fleet.answer import parse_answer

CONTRACT = Path(__file__).parents[2] / "contract" / "speculation"
EXCHANGES = {path.stem: json.loads(path.read_text()) for path in sorted(CONTRACT.glob("*.json"))}
ANSWERS = {name: each["response"]["body"] for name, each in EXCHANGES.items() if each["response"]["status"] == 200}
ACTIVE = ANSWERS["get-active"]


@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_of_the_contract_is_understood(name):
    body = ANSWERS[name]
    answer = parse_answer(body)
    assert answer.revision == body["policy"]["revision"]
    assert answer.state == body["effective"]["state"]
    assert answer.counters.running_request_seconds == body["counters"]["running_request_seconds"]
    assert answer.break_even_concurrency == body["breakEvenConcurrency"]
    assert answer.draft_ok is body["draft"]["ok"]


def _with(path, value):
    body = copy.deepcopy(ACTIVE)
    *outer, last = path.split(".")
    part = body
    for name in outer:
        part = part[name]
    if value is KeyError:
        del part[last]
    else:
        part[last] = value
    return body


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("counters.drafts", KeyError),
        ("counters.drafts", "12"),
        ("counters.drafts", None),
        ("counters.drafts", True),
        ("counters.running_request_seconds", -1),
        ("counters.running_request_seconds", math.nan),
        ("counters.uptime_seconds", math.inf),
        ("counters.uptime_seconds", 10**400),
        ("effective.tokens", -math.inf),
        ("effective.maxTokens", 1.5),
        ("effective.state", 3),
        ("policy.revision", None),
        ("running", []),
        ("breakEvenConcurrency", 2.5),
        ("speedup", "fast"),
        ("draft.ok", 1),
        ("draft", []),
        ("model.parameters", {}),
        ("counters", None),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(path, value):
    with pytest.raises(ValueError) as error:
        parse_answer(_with(path, value))
    assert str(error.value).startswith(path)


@pytest.mark.parametrize("body", [None, [], "x", 3, {}], ids=str)
def test_a_body_that_is_no_answer_is_refused(body):
    with pytest.raises(ValueError):
        parse_answer(body)


def test_fields_of_a_newer_runtime_are_no_reason_to_refuse():
    assert parse_answer({**ACTIVE, "later": 1}) == parse_answer(ACTIVE)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.sampled_from([f"{a}.{b}" for a, part in ACTIVE.items() if isinstance(part, dict) for b in part]), _JSON)
def test_nothing_a_pod_can_say_raises_anything_but_value_error(path, value):
    try:
        answer = parse_answer(_with(path, value))
    except ValueError:
        return
    assert all(0 <= number < math.inf for number in (answer.tokens, answer.counters.drafts, answer.max_tokens))
