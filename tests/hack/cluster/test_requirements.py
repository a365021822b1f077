"""What must be there before anything starts."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest
from localcluster import disk, requirements
from localcluster.errors import ClusterError
from localcluster.paths import Home

Usage = namedtuple("Usage", "total used free")


def test_packages_that_dpkg_does_not_have_installed_are_missing() -> None:
    answer = "runc ii \ncontainerd ii\nskopeo rc \n"
    assert requirements.missing_packages(["runc", "containerd", "skopeo", "buildah"], answer) == ["skopeo", "buildah"]


def test_every_needed_package_is_named_once() -> None:
    wanted = requirements.wanted_packages(requirements.PACKAGES.read_text())
    assert len(wanted) == len(set(wanted)) >= 10


def test_without_root_it_is_said_before_anything_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="root is needed"):
        requirements.check_node(Home(tmp_path))


def test_missing_tools_are_all_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"missing: containerd, ctr.*runc.*cluster packages"):
        requirements.check_node(Home(tmp_path))


def test_too_little_disk_says_how_much_is_needed_where_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(10, 9, 0.3 * disk.GB))
    with pytest.raises(ClusterError, match=r"a cluster needs 1\.0 GB free at .*new, 0\.3 GB are.*OUTRIDER_HOME"):
        disk.require(tmp_path / "new", disk.GB, "a cluster")
