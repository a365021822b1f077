"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from localcluster import __main__ as command
from localcluster.lifecycle import ENTRY


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster of this machine is touched."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    for name in ("OUTRIDER_CLUSTER", "CLUSTER", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_the_cluster_is_named_by_the_option_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.parser().parse_args(["up"]).name == "default"
    monkeypatch.setenv("OUTRIDER_CLUSTER", "e2e")
    assert command.parser().parse_args(["up"]).name == "e2e"
    assert command.parser().parse_args(["--name", "mine", "up"]).name == "mine"


def test_what_follows_kubectl_is_kubectls() -> None:
    arguments = command.parse(["kubectl", "-n", "x", "get", "pods", "--help"])
    assert arguments.arguments == ["-n", "x", "get", "pods", "--help"]
    assert command.parse(["--name", "sh", "status"]).name == "sh"


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["up", "--gpus", "-1"], ["up", "--gpus", "x"], ["kill", "nothing"], ["kill", "etcd", "LOUD"],
              ["load-image"]]
)  # fmt: skip
def test_nonsense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        command.parser().parse_args(words)
    assert refusal.value.code == 2
    assert "usage: cluster" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["kubeconfig"], ["kubectl", "get", "pods"], ["kill", "etcd"], ["load-image", "a:b"]])
def test_what_needs_a_cluster_says_in_one_line_how_to_start_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "cluster: cluster default is down: start it with `hack/cluster/cluster --name default up`\n"


def test_status_of_a_cluster_that_is_down_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["status"]) == 3
    assert capsys.readouterr().out.startswith("cluster default: down\n")


def test_with_the_current_context_the_callers_kubeconfig_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("{}")
    monkeypatch.setenv("CLUSTER", "current")
    monkeypatch.setenv("KUBECONFIG", f"{mine}:/elsewhere")
    assert command.main(["kubeconfig"]) == 0
    assert capsys.readouterr().out == f"{mine}\n"
    for word in ("up", "down"):
        assert command.main([word]) == 0
        assert "nothing to do" in capsys.readouterr().out
    assert command.main(["load-image", "a:b"]) == 1
    assert "registry" in capsys.readouterr().err


def test_the_current_context_without_a_kubeconfig_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLUSTER", "current")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    assert command.main(["kubeconfig"]) == 1
    assert "set KUBECONFIG" in capsys.readouterr().err


def test_the_entry_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    program = f"import sys, runpy; sys.argv = ['cluster', 'status']; runpy.run_path({json.dumps(str(ENTRY))})"
    environment = {"OUTRIDER_HOME": str(tmp_path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], env=environment, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (3, "")
