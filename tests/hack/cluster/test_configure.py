"""What the components are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from localcluster import components, configure
from localcluster.build import PROGRAMS
from localcluster.network import Network
from localcluster.paths import Home, Place

NET = Network("10.42")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place("t", tmp_path / "t")


def test_every_program_that_runs_in_the_node_has_a_command_line(place: Place) -> None:
    assert {*components.arguments(place, NET)} == {*PROGRAMS, "containerd"} - {"kubectl"}
    assert {*components.arguments(place, NET)} > components.NEED_API


def test_files_that_command_lines_name_are_written(place: Place) -> None:
    configure.write(place, NET)
    made_by_the_server = {str(place.certificate)}
    words = [word for arguments in components.arguments(place, NET).values() for word in arguments]
    named = {word.split("=")[-1] for word in words if str(place.conf) in word} - {f"{place.conf}/pki"}
    assert len(named) >= 8
    for path in named - made_by_the_server:
        assert Path(path).exists(), path


def test_secrets_are_readable_by_their_owner_alone(place: Place) -> None:
    configure.write(place, NET)
    for path in (
        place.kubeconfig,
        place.conf / "tokens.csv",
        place.conf / "kubelet.kubeconfig",
        place.conf / "pki/sa.key",
    ):
        assert path.stat().st_mode & 0o077 == 0, path


def test_the_kubeconfig_leads_to_the_node_as_admin(place: Place) -> None:
    token = configure.write(place, NET)
    config = json.loads(place.kubeconfig.read_text())
    assert config["clusters"][0]["cluster"]["server"] == "https://10.42.0.2:6443"
    assert config["users"][0]["user"] == {"token": token}
    assert f'{token},admin,admin,"system:masters"' in (place.conf / "tokens.csv").read_text()


def test_each_start_has_fresh_tokens(place: Place) -> None:
    assert configure.write(place, NET) != configure.write(place, NET)


def test_pods_get_addresses_of_the_clusters_network_and_its_dns(place: Place) -> None:
    assert configure.cni(NET)["plugins"][0]["ipam"]["ranges"] == [[{"subnet": "10.42.1.0/24"}]]
    assert configure.kubelet(place, NET)["clusterDNS"] == ["10.42.0.2"]
    assert "bind 10.42.0.2" in configure.corefile(place, NET)


def test_kubelet_never_evicts_for_a_full_disk_nor_deletes_images(place: Place) -> None:
    settings = configure.kubelet(place, NET)
    assert settings["imageGCHighThresholdPercent"] == 100
    assert {settings["evictionHard"][f"{fs}.available"] for fs in ("nodefs", "imagefs")} == {"0%"}


def test_two_clusters_share_no_name_on_the_machine(tmp_path: Path) -> None:
    one, two = (Place.of(Home(tmp_path), name) for name in ("one", "two"))
    for names in ({one.cgroup, two.cgroup}, {one.link, two.link}, {one.root, two.root}, {one.lock, two.lock}):
        assert len(names) == 2
    assert len(one.link) <= 15, "the longest name of an interface"


def test_programs_that_follow_another_are_programs_of_the_node(place: Place) -> None:
    programs = components.arguments(place, NET)
    for leader, followers in components.FOLLOWERS.items():
        assert {leader, *followers} <= {*programs}
        assert leader not in followers
