"""The demo's own parts: what it says when a step fails, and how it reads what the cluster tells."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from localcluster.disk import GB
from localcluster.paths import Home

from demo import cluster, images, install, models, steps
from demo.chat import Answer
from demo.kubectl import Kubectl, condition, is_true, stands_at
from demo.steps import Step, StepError, step
from demo.story import Story

PYTHON = sys.executable


@pytest.fixture(autouse=True)
def _own_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(steps, "LOGS", tmp_path)


def test_a_failed_command_shows_the_end_of_its_log_and_what_to_look_at(tmp_path: Path) -> None:
    script = "import sys; print('\\n'.join(f'line {n}' for n in range(99))); sys.exit('the reason')"
    with pytest.raises(SystemExit) as stopped, step("some step", ["df -h", "make down"]) as now:
        now.run(PYTHON, "-c", script)
    said = str(stopped.value)
    assert said.startswith("\nsome step failed: ")
    assert "the reason" in said
    assert "line 98" in said
    assert "line 9\n" not in said
    assert str(tmp_path / "some-step.log") in said
    assert said.endswith("look at:\n    df -h\n    make down")


def test_an_error_nobody_thought_of_is_shown_with_its_type() -> None:
    with pytest.raises(SystemExit, match="KeyError: 'spec'"), step("x", []):
        _ = {}["spec"]  # type: ignore[var-annotated]  # its absence is the point


def test_a_wait_that_ends_says_how_things_stood() -> None:
    with pytest.raises(StepError, match="Ready: not within 0 s; it stands at: Loading"):
        Step("x").wait("Ready", lambda: (None, "Loading"), deadline=0)


def test_a_wait_gives_what_it_waited_for() -> None:
    looks = iter([(None, "not yet"), (7, "")])
    assert Step("x").wait("seven", lambda: next(looks), deadline=60) == 7


def model(*, generation: int, observed: int, status: str = "True") -> dict[str, Any]:
    ready = {"type": "Ready", "status": status, "reason": "Ready", "observedGeneration": observed, "message": "m"}
    return {"metadata": {"generation": generation}, "status": {"conditions": [ready]}}


def test_a_condition_of_an_older_generation_does_not_count() -> None:
    assert is_true(model(generation=2, observed=2), "Ready")
    assert not is_true(model(generation=3, observed=2), "Ready")
    assert condition(None, "Ready") == {}
    assert stands_at(model(generation=2, observed=2, status="False"), "Ready") == "Ready False Ready: m"


def test_passes_through_the_target_are_the_tokens_that_no_draft_gave() -> None:
    answer = Answer("text", tokens=31, accepted=20, drafted=44, seconds=2.0)
    assert answer.forwards == 11
    assert answer.tokens_per_second == 15


def test_the_claim_is_bound_to_its_volume_and_the_volume_to_its_claim() -> None:
    volume, claim = models.volume_and_claim("v", "ns")
    assert volume["spec"]["claimRef"] == {"namespace": "ns", "name": claim["metadata"]["name"]}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"] == "v"
    for field in ("accessModes", "storageClassName"):
        assert volume["spec"][field] == claim["spec"][field]


class Recorded(Kubectl):
    """kubectl whose answers are given."""

    def __init__(self, objects: list[dict[str, Any]], row: str = "") -> None:
        super().__init__("kubectl")
        object.__setattr__(self, "objects", objects)
        object.__setattr__(self, "row", row)
        object.__setattr__(self, "said", [])

    def __call__(self, *words: str, stdin: str | None = None) -> str:
        self.said.append(words)
        return f"NAME\n{self.row}\n"

    def get(self, *words: str) -> dict[str, Any] | None:
        return self.objects.pop(0) if self.objects[1:] else self.objects[0]

    def items(self, *words: str) -> list[dict[str, Any]]:
        return self.objects


def pod(name: str, image: str, image_id: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"containerStatuses": [{"image": image, "imageID": image_id}]}}


def test_only_pods_of_another_build_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "identity", lambda image: "b" * 64)
    kubectl = Recorded(
        [
            pod("new", "x:dev", "sha256:" + "b" * 64),
            pod("old", "x:dev", "sha256:" + "a" * 64),
            pod("starting", "x:dev", ""),
            pod("other", "y:dev", "sha256:" + "a" * 64),
        ]
    )
    assert images.replace_stale_pods(kubectl, "app=x", "x:dev") == 1
    assert kubectl.said == [("delete", "pod", "--wait=false", "old")]


def operator(*, available: int = 1, generation: int = 2) -> dict[str, Any]:
    return {
        "kind": "Deployment",
        "metadata": {"generation": 2},
        "spec": {"replicas": 1},
        "status": {
            "observedGeneration": generation,
            "replicas": 1,
            "updatedReplicas": 1,
            "availableReplicas": available,
        },
    }


LEAVING = {"kind": "Pod", "metadata": {"name": "old", "deletionTimestamp": "2026-01-01T00:00:00Z"}}
STAYING = {"kind": "Pod", "metadata": {"name": "new"}}


@pytest.mark.parametrize(
    ("objects", "done"),
    [
        ([operator(), STAYING], True),
        ([operator(), STAYING, LEAVING], None),
        ([operator(available=0), STAYING], None),
        ([operator(generation=1), STAYING], None),
        ([], None),
    ],
    ids=["all there", "one still leaves", "not available", "an older template", "not installed"],
)
def test_the_operator_is_available_once_its_pods_and_no_others_run(objects: list[dict[str, Any]], done: bool) -> None:
    assert install.available(Recorded(objects))[0] is done


def test_the_story_tells_a_row_when_there_is_news_and_only_then() -> None:
    def at(state: str) -> dict[str, Any]:
        obj = model(generation=1, observed=1)
        obj["status"]["speculativeDecoding"] = {"state": state}
        return obj

    told: list[str] = []
    story = Story(
        Recorded([at("Active"), at("Active"), at("Suspended"), at("Active")], row="demo"), "demo", told.append
    )
    for _ in range(5):
        story.look()
    assert [line.split()[-1] for line in told] == ["NAME", "demo", "demo", "demo"]


@pytest.mark.parametrize(
    ("free", "demo_ran", "enough"), [(31, False, True), (29, False, False), (5, True, True), (3, True, False)]
)
def test_a_disk_that_would_fill_up_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, demo_ran: bool, enough: bool
) -> None:
    if demo_ran:
        (tmp_path / "demo").mkdir()
        (tmp_path / "demo/loaded").touch()
    monkeypatch.setattr(cluster, "HOME", Home(tmp_path))
    monkeypatch.setattr(cluster, "free", lambda folder: free * GB)
    if enough:
        cluster.check_space()
    else:
        with pytest.raises(StepError, match=f"GB of free disk are needed at {tmp_path}, {free}.0 GB are free"):
            cluster.check_space()
