"""Making the cluster's groups, in both versions of the kernel's interface. Folders stand for the hierarchies here."""

from __future__ import annotations

from pathlib import Path

import pytest
from localcluster import cgroups
from localcluster.errors import ClusterError


def tree(root: Path, **files: str) -> Path:
    """Files by path; __ is a slash and _ a dot. Those that the kernel makes with a group are there before it."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_in_v2_each_level_hands_down_what_kubelet_wants_of_what_it_has(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        cgroup_controllers="cpuset cpu io memory hugetlb pids rdma misc",
        name__cgroup_controllers="cpuset cpu memory pids misc",
    )
    assert cgroups.create("name", root) == [root / "name/daemons/cgroup.procs"]
    assert (root / "cgroup.subtree_control").read_text() == "+cpuset +cpu +io +memory +hugetlb +pids"
    assert (root / "name/cgroup.subtree_control").read_text() == "+cpuset +cpu +memory +pids"
    assert (root / "name/daemons").is_dir()


def test_in_v2_a_root_that_is_not_the_machines_is_said_with_the_fix(tmp_path: Path) -> None:
    root = tree(tmp_path, cgroup_controllers="cpu memory")
    (root / "cgroup.subtree_control").mkdir()  # no write succeeds, even by root
    with pytest.raises(ClusterError, match=r"cannot hand \+cpu \+memory down: .*--cgroupns=host"):
        cgroups.create("name", root)


def test_in_v1_groups_are_made_in_every_hierarchy_and_may_use_their_parents_cpus(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        memory__tasks="",
        cpuset__tasks="",
        cpuset__cpuset_cpus="0-1",
        cpuset__cpuset_mems="0",
        cpuset__name__cpuset_cpus="",
        cpuset__name__cpuset_mems="",
        cpuset__name__daemons__cpuset_cpus="",
        cpuset__name__daemons__cpuset_mems="",
    )
    made = cgroups.create("name", root)
    assert made == [root / f"{hierarchy}/name/daemons/cgroup.procs" for hierarchy in ("cpuset", "memory")]
    for group in ("name", "name/daemons"):
        assert (root / "cpuset" / group / "cpuset.cpus").read_text() == "0-1"
        assert (root / "cpuset" / group / "cpuset.mems").read_text() == "0"


def test_a_machine_without_cgroups_is_told_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="mount them"):
        cgroups.create("name", tmp_path)
