"""Why pods do not serve, in the words users search for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.build import pod

from outrider_operator.api.reasons import Reason
from outrider_operator.failures import EXIT_CODES, FAILURES, failure, pod_failure

TERMINATIONS = json.loads((Path(__file__).parents[1] / "contract" / "termination.json").read_text())


@pytest.mark.parametrize("case", TERMINATIONS, ids=lambda case: case["reason"])
def test_the_runtimes_last_words_are_understood(case):
    found = pod_failure(pod(exit_code=case["exitCode"], termination_message=case["text"], restarts=1))
    assert found.reason == case["reason"]
    assert f"{found.reason}: {found.message}" == case["text"]


def test_every_exit_code_of_the_contract_is_known_and_no_other():
    assert {case["exitCode"]: case["reason"] for case in TERMINATIONS} == EXIT_CODES


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"unschedulable": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}, Reason.INSUFFICIENT_GPU),
        ({"unschedulable": "0/3 nodes: 3 Insufficient nvidia.com/mig-1g.10gb."}, Reason.INSUFFICIENT_GPU),
        ({"unschedulable": "0/3 nodes are available: 3 Insufficient memory."}, Reason.UNSCHEDULABLE),
        ({"waiting_reason": "ErrImagePull", "waiting_message": "not found"}, Reason.IMAGE_PULL_FAILED),
        ({"waiting_reason": "ImagePullBackOff"}, Reason.IMAGE_PULL_FAILED),
        ({"waiting_reason": "InvalidImageName"}, Reason.IMAGE_PULL_FAILED),
        (
            {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'secret "hf-token" not found'},
            Reason.MISSING_SECRET,
        ),
        (
            {
                "waiting_reason": "CreateContainerConfigError",
                "waiting_message": "couldn't find key token in Secret team/hf",
            },
            Reason.MISSING_SECRET,
        ),
        (
            {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'configmap "env" not found'},
            Reason.CRASH_LOOPING,
        ),
        (
            {"waiting_reason": "CreateContainerConfigError", "waiting_message": "image will run as root"},
            Reason.CRASH_LOOPING,
        ),
        ({"waiting_reason": "CreateContainerError", "waiting_message": "no such device"}, Reason.CRASH_LOOPING),
        ({"termination_reason": "OOMKilled", "exit_code": 137, "restarts": 1}, Reason.OUT_OF_MEMORY),
        ({"waiting_reason": "CrashLoopBackOff", "exit_code": 1, "restarts": 1}, Reason.CRASH_LOOPING),
        ({"exit_code": 1, "restarts": 2}, Reason.CRASH_LOOPING),
        ({"exit_code": 66, "termination_message": "Traceback", "restarts": 3}, Reason.CRASH_LOOPING),
        ({"exit_code": 77, "termination_message": "ModelNotFound: x", "restarts": 3}, Reason.CRASH_LOOPING),
        ({"exit_code": 137, "termination_reason": "Error", "restarts": 1}, None),
        ({"waiting_reason": "ContainerCreating"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_each_failure_has_its_reason(fields, reason):
    found = pod_failure(pod(**fields))
    assert (found and found.reason) == reason


@pytest.mark.parametrize(
    "fields", [{"ready": True}, {"deleting": True}, {"phase": "Failed"}], ids=("recovered", "leaving", "replaced")
)
def test_a_pod_that_serves_or_goes_explains_nothing(fields):
    assert pod_failure(pod(exit_code=1, restarts=9, waiting_reason="CrashLoopBackOff", **fields)) is None


def test_a_back_off_and_the_error_it_quotes_are_one_failure():
    error = 'failed to pull image "x:1": not found'
    first = pod(waiting_reason="ErrImagePull", waiting_message=error)
    later = pod(
        waiting_reason="ImagePullBackOff", waiting_message=f'Back-off pulling image "x:1": ErrImagePull: {error}'
    )
    assert pod_failure(first) == pod_failure(later)


def test_a_crash_says_its_code_and_its_last_line():
    crash = pod(exit_code=1, restarts=4, termination_message="Traceback\n  ...\nKeyError: 'x'\n")
    assert pod_failure(crash).message == "the container exits with code 1: KeyError: 'x'"


def test_of_several_failures_the_runtimes_own_words_are_shown():
    words = next(case for case in TERMINATIONS if case["reason"] == "OutOfMemory")
    pods = [
        pod("a", unschedulable="Insufficient nvidia.com/gpu"),
        pod("c", exit_code=words["exitCode"], termination_message=words["text"]),
        pod("b", waiting_reason="CrashLoopBackOff"),
    ]
    assert failure(pods).pod == "c"
    assert failure(pods) == failure(pods[::-1])
    assert failure([]) is None


@settings(deadline=None)
@given(
    st.text(),
    st.text(),
    st.sampled_from(["", "CrashLoopBackOff", "ErrImagePull", "CreateContainerError"]),
    st.sampled_from([None, 1, 66, 137]),
    st.integers(0, 3),
)
def test_whatever_a_pod_says_the_message_is_one_bounded_line(unschedulable, last, waiting, code, restarts):
    fields = {"waiting_message": last, "termination_message": last, "exit_code": code, "restarts": restarts}
    found = failure([pod(unschedulable=unschedulable, waiting_reason=waiting, **fields)])
    if found is not None:
        assert found.reason in FAILURES
        assert len(found.message) <= 500
        assert len(found.message.splitlines()) <= 1
