"""The committed pins must agree with pyproject.toml and with each other: an image, the development
environment and continuous integration install from different files of the set."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PARTS = ("operator", "runtime", "torch", "torch-cpu", "dev")
# Linux is where the images and the tests run; the markers carry every supported Python.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def pins(name: str) -> list[Requirement]:
    return [Requirement(line) for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines()]


def pinned(name: str, python: str) -> dict[str, Version]:
    """Version by package for one Python on Linux, x86-64."""
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    environment |= {"sys_platform": "linux", "platform_machine": "x86_64"}
    return {
        canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("=="))
        for pin in pins(name)
        if pin.marker is None or pin.marker.evaluate(environment)
    }


def wanted() -> dict[str, list[str]]:
    return {**PROJECT["project"]["optional-dependencies"], "dev": PROJECT["dependency-groups"]["dev"]}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("group", ["operator", "runtime", "dev"])
def test_every_dependency_is_pinned_within_its_bounds(group: str, python: str) -> None:
    files = ("runtime", "torch") if group == "runtime" else (group,)
    versions = {name: version for file in files for name, version in pinned(file, python).items()}
    for requirement in map(Requirement, wanted()[group]):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name}: run `make lock`"
        assert requirement.specifier.contains(version), f"{requirement}, not {version}: run `make lock`"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_a_subset_of_the_whole_set(part: str, python: str) -> None:
    assert pinned(part, python).items() <= pinned("all", python).items()


@pytest.mark.parametrize("python", PYTHONS)
def test_the_parts_together_are_the_whole_set(python: str) -> None:
    assert set().union(*(pinned(part, python) for part in PARTS)) == set(pinned("all", python))


def test_the_cpu_set_keeps_triton_and_leaves_only_cuda_libraries_out() -> None:
    full, cpu = (pinned(name, "3.12") for name in ("torch", "torch-cpu"))
    assert cpu.items() <= full.items()
    assert {"torch", "triton"} <= set(cpu)
    assert all(name.startswith(("cuda-", "nvidia-")) for name in set(full) - set(cpu))


@pytest.mark.parametrize("part", ["operator", "runtime", "dev"])
def test_the_torch_stack_is_in_no_other_file(part: str) -> None:
    # else an environment for CPUs would take from here what torch-cpu.txt leaves out
    assert not set(pinned(part, "3.12")) & set(pinned("torch", "3.12"))


@pytest.mark.parametrize("part", [*PARTS, "all"])
def test_no_file_names_an_index_or_an_address(part: str) -> None:
    for line in (ROOT / f"requirements/{part}.txt").read_text().splitlines():
        assert "://" not in line
        assert not line.startswith("-")
