"""What breaks while it serves: the engine, the pod, the operator, the API server, the user's own input."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import openai
import pytest
from tests.e2e.site import NAME, PATIENCE, Site, poll, ready

from demo import chat, install
from demo.cluster import PROGRAM
from demo.kubectl import condition, is_true
from demo.steps import StepError

pytestmark = [pytest.mark.node, pytest.mark.timeout(PATIENCE)]

# Ends every process of the container but its first, which is the one that talks to clients.
KILL_THE_ENGINE = """
import os, pathlib, signal
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    if entry.name not in ("1", str(os.getpid())):
        os.kill(int(entry.name), signal.SIGKILL)
"""


def long_answer(service: openai.OpenAI) -> Iterator[str]:
    """Pieces of an answer that takes many seconds; raises what the client makes of the stream's end."""
    stream = service.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Tell me a very long story."}],
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


def expect_error_event(answer: Iterator[str]) -> None:
    """The rest of the stream ends with an error that the server sent, not with a connection that broke."""
    with pytest.raises(openai.APIError) as told:
        list(answer)
    assert not isinstance(told.value, openai.APIConnectionError), told.value


def drafts(service: openai.OpenAI, wanted: bool) -> tuple[bool | None, str]:
    """Whether a request is served with drafts, as `wanted`. A restarted API server has the node's proxy start over."""
    try:
        drafted = chat.ask(service, NAME, chat.QUESTION, max_tokens=8).drafted
    except openai.APIConnectionError as error:
        return None, str(error)
    return (True if bool(drafted) == wanted else None), f"{drafted} tokens drafted"


def answers(site: Site) -> tuple[bool | None, str]:
    try:
        site.get(NAME)
    except StepError as error:
        return None, str(error)
    return True, ""


def test_an_engine_that_dies_in_mid_stream_is_told_to_the_client_and_started_again(served: Site) -> None:
    (pod,) = served.pods(NAME)
    with served.client() as service:
        answer = long_answer(service)
        next(answer)
        served.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", KILL_THE_ENGINE)
        expect_error_event(answer)
    served.until("not Ready", lambda obj: not ready(obj))
    served.until("Ready again", ready)
    (same,) = served.pods(NAME)
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert same["status"]["containerStatuses"][0]["restartCount"] == 1
    with served.client() as service:
        assert chat.ask(service, NAME, "Are you back?", max_tokens=4).tokens


def test_a_pod_deleted_in_mid_stream_ends_the_stream_with_an_error_and_is_replaced(served: Site) -> None:
    (pod,) = served.pods(NAME)
    with served.client() as service:
        answer = long_answer(service)
        next(answer)
        served.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
        expect_error_event(answer)
    served.until("Ready again", lambda obj: ready(obj) and obj["status"]["readyReplicas"] == 1)
    poll("one pod", lambda: (len(served.pods(NAME)) == 1 or None, "the old pod remains"))
    assert served.pods(NAME)[0]["metadata"]["uid"] != pod["metadata"]["uid"]


def test_an_operator_killed_right_after_an_edit_catches_up_and_serving_goes_on(served: Site) -> None:
    (pod,) = served.pods(NAME)
    with served.client() as service:
        served.apply(NAME, lambda spec: spec["speculativeDecoding"].update(mode="Disabled"))
        served.system("delete", "pod", "--selector", install.SELECTOR, "--grace-period=0", "--force")
        assert chat.ask(service, NAME, chat.QUESTION, max_tokens=4).tokens
        served.until("disabled", lambda obj: obj["status"]["speculativeDecoding"]["state"] == "Disabled")
        poll("plain", lambda: drafts(service, False))
        served.apply(NAME)
        poll("drafting", lambda: drafts(service, True))
    (same,) = served.pods(NAME)
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]


def test_an_api_server_killed_comes_back_to_the_same_state(served: Site) -> None:
    if not served.cluster.local:
        pytest.skip("a foreign cluster's API server is not ours to kill")
    (pod,) = served.pods(NAME)
    with served.client() as service:
        subprocess.run([PROGRAM, "kill", "kube-apiserver", "KILL"], check=True)
        assert chat.ask(service, NAME, chat.QUESTION, max_tokens=4).tokens  # serving needs no API server
        poll("API server", lambda: answers(served))
        served.apply(NAME, lambda spec: spec["speculativeDecoding"].update(mode="Disabled"))
        poll("plain", lambda: drafts(service, False))
    (same,) = served.pods(NAME)
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]


def test_a_missing_model_folder_becomes_a_reason_and_recovers_with_the_right_one(site: Site) -> None:
    def wrong(spec: dict) -> None:
        spec["model"]["uri"] = "pvc://demo-models/no-such-model"

    site.apply("lost", wrong)
    obj = site.until(
        "ModelNotFound",
        lambda obj: condition(obj, "ModelReady").get("reason") == "ModelNotFound",
        name="lost",
        condition="ModelReady",
    )
    assert "no-such-model" in condition(obj, "ModelReady")["message"]
    assert not ready(obj)
    site.apply("lost")
    site.until("recovered", ready, name="lost")
    assert is_true(site.get("lost"), "ModelReady")
    site.kubectl("delete", "specm", "lost")
