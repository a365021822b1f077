"""How images are built: what reaches the builder, and what must never be written down."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_ENV = ROOT / "hack/image/build-env"


def build_env(**environment: str) -> dict[str, str]:
    """The exports that build-env prints in a bare environment plus the one given."""
    printed = subprocess.run(
        [BUILD_ENV],
        env={
            "PATH": os.environ["PATH"],
            "HOME": "/nonexistent",
            "PIP_CONFIG_FILE": os.devnull,
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exports = {}
    for line in printed.splitlines():
        word, assignment = shlex.split(line)
        assert word == "export"
        name, _, value = assignment.partition("=")
        exports[name] = value
    return exports


def test_uv_and_pip_are_given_the_hosts_index() -> None:
    exports = build_env(PIP_INDEX_URL="https://user:pa$$'word@index.example/simple")
    assert exports["PIP_INDEX_URL"] == "https://user:pa$$'word@index.example/simple"
    assert exports["UV_DEFAULT_INDEX"] == exports["PIP_INDEX_URL"]


def test_an_index_from_pips_configuration_file_is_found(tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://index.example/simple\ntrusted-host = index.example\n")
    exports = build_env(PIP_CONFIG_FILE=str(config))
    assert exports["UV_DEFAULT_INDEX"] == "https://index.example/simple"
    assert exports["UV_INSECURE_HOST"] == "index.example"


def test_what_the_caller_says_to_uv_wins_over_pips_setting() -> None:
    exports = build_env(PIP_INDEX_URL="https://one.example/", UV_DEFAULT_INDEX="https://two.example/")
    assert exports["UV_DEFAULT_INDEX"] == "https://two.example/"


def test_nothing_is_exported_where_nothing_is_set() -> None:
    assert build_env() == {}


def test_with_build_env_runs_its_command_without_secrets() -> None:
    command = [ROOT / "hack/image/with-build-env", "echo", "a b"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "a b\n"


def test_a_build_of_nothing_is_refused_before_anything_is_installed() -> None:
    refusal = subprocess.run([ROOT / "hack/image/build.sh", "--no-cache"], capture_output=True, text=True, check=False)
    assert (refusal.returncode, refusal.stderr) == (2, "which image? operator, runtime or both\n")


def test_the_code_is_the_last_step_of_both_images() -> None:
    """Whatever came after it would be made anew with every change of code."""
    stages = re.split(r"^FROM .*$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    last = [stage.split("\n# ---")[0].strip().splitlines()[-1] for stage in stages[-2:]]
    assert last == [
        f"COPY --chmod=0755 {name}/outrider_{name} /opt/outrider/outrider_{name}" for name in ("operator", "runtime")
    ]


@pytest.mark.parametrize("path", ["Dockerfile", *(f"hack/image/{p.name}" for p in (ROOT / "hack/image").iterdir())])
def test_no_registry_host_is_written_down(path: str) -> None:
    assert not re.search(r"https?://", (ROOT / path).read_text())


def test_the_images_run_as_a_numeric_user_that_is_not_root() -> None:
    users = re.findall(r"^USER (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert users == ["65532:65532"] * 2  # a kubelet cannot check runAsNonRoot against a name


@pytest.mark.parametrize("folder", ["operator", "runtime"])
def test_the_package_folders_are_no_packages_themselves(folder: str) -> None:
    # A package named `operator` would shadow the standard library's for whatever runs from the root.
    assert not (ROOT / folder / "__init__.py").exists()


def test_the_wheel_holds_both_packages_and_nothing_else(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "outrider_operator",
        "outrider_runtime",
    }
