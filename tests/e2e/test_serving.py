"""From an applied object to answers through its Service."""

from __future__ import annotations

import subprocess

import openai
import pytest
from tests.e2e.site import NAME, PATIENCE, Site

from demo import chat
from demo.kubectl import condition, is_true

pytestmark = [pytest.mark.node, pytest.mark.timeout(PATIENCE)]


def test_a_ready_object_says_what_it_serves(served: Site) -> None:
    obj = served.get(NAME)
    status = obj["status"]
    for kind in ("Ready", "Accepted", "ModelReady", "DraftReady", "Available"):
        assert is_true(obj, kind), condition(obj, kind)
    assert (status["replicas"], status["readyReplicas"], status["desiredReplicas"]) == (1, 1, 1)
    assert status["observedGeneration"] == obj["metadata"]["generation"]
    assert status["speculativeDecoding"]["state"] == "Active"
    assert status["model"]["parameters"] > 130e6
    assert status["url"].startswith(f"http://{NAME}.{served.kubectl.namespace}")


def test_a_streamed_speculative_answer_equals_plain_greedy_decoding_in_fewer_forwards(served: Site) -> None:
    pieces: list[str] = []
    with served.client() as service:
        answer = chat.ask(service, NAME, chat.QUESTION, max_tokens=64, show=pieces.append)
        plain = chat.ask(service, NAME, chat.QUESTION, max_tokens=64, speculative=False)
    assert len(pieces) > 1
    assert "".join(pieces) == answer.text == plain.text
    assert (plain.drafted, plain.accepted) == (0, 0)
    assert 0.3 < answer.accepted / answer.drafted < 0.95  # a 4-bit copy is close to its target, and no more
    assert answer.forwards < 0.7 * plain.forwards


def test_a_sampled_answer_depends_on_its_seed_and_not_on_speculation(served: Site) -> None:
    def sample(service: openai.OpenAI, seed: int, speculative: bool) -> str:
        completion = service.completions.create(
            model=NAME,
            prompt="Once upon a time",
            max_tokens=16,
            temperature=1,
            seed=seed,
            extra_body={} if speculative else {"speculative": False},
        )
        assert completion.usage is not None
        assert completion.usage.completion_tokens <= 16
        return completion.choices[0].text

    with served.client() as service:
        assert sample(service, 1, True) == sample(service, 1, False)
        assert sample(service, 1, True) != sample(service, 2, True)


def test_a_field_that_is_not_supported_is_refused_by_name(served: Site) -> None:
    with served.client() as service, pytest.raises(openai.BadRequestError, match="response_format"):
        service.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_object"},
        )


def test_the_runtime_runs_as_nobody_and_can_write_only_its_caches(served: Site) -> None:
    script = "import os; print(os.getuid()); open('/opt/outrider/x', 'w')"
    command = served.kubectl.command("exec", f"deployment/{NAME}", "--", "python", "-c", script)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "65532"
    assert "Read-only file system" in result.stderr
