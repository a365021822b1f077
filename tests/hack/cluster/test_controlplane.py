"""The control plane alone, as the tests of tests/cluster use it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster import controlplane
from localcluster.api import poll
from localcluster.controlplane import ControlPlane
from localcluster.errors import ApiError, ClusterError

CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"


@pytest.fixture(scope="module")
def plane(binaries: Path) -> Iterator[ControlPlane]:
    with ControlPlane(binaries) as plane:
        yield plane


def config_map(name: str, **more: object) -> dict[str, object]:
    return {"metadata": {"name": name, **more}}


def test_it_leaves_no_process_and_no_folder(binaries: Path) -> None:
    with ControlPlane(binaries) as plane:
        pids = [process.pid for process in plane._processes.values()]
        assert plane.api.request("GET", "/version")["gitVersion"].startswith("v1.")
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not plane.folder.exists()
    plane.stop()


def test_a_user_has_no_rights_but_those_granted(plane: ControlPlane) -> None:
    config = plane.kubeconfig_for("alice", "team:red")
    whoami = json.loads(plane.kubectl("auth", "whoami", "-o", "json", kubeconfig=config))["status"]["userInfo"]
    assert whoami["username"] == "alice"
    assert "team:red" in whoami["groups"]
    with pytest.raises(ClusterError, match='User "alice" cannot list'):
        plane.kubectl("get", "configmaps", kubeconfig=config)
    plane.kubectl("create", "role", "reader", "--verb=list", "--resource=configmaps")
    plane.kubectl("create", "rolebinding", "red", "--role=reader", "--group=team:red")
    assert plane.kubectl("get", "configmaps", "-o", "name", kubeconfig=config) == ""


def test_a_service_account_acts_with_its_own_token(plane: ControlPlane) -> None:
    plane.kubectl("create", "serviceaccount", "robot")
    config = plane.kubeconfig_for_service_account("default", "robot")
    whoami = json.loads(plane.kubectl("auth", "whoami", "-o", "json", kubeconfig=config))["status"]["userInfo"]
    assert whoami["username"] == "system:serviceaccount:default:robot"


def test_a_killed_api_server_comes_back_where_it_was_with_all_that_was_written(plane: ControlPlane) -> None:
    plane.api.request("POST", CONFIG_MAPS, config_map("kept"))
    url = plane.url
    plane.kill_api_server()
    with pytest.raises(OSError):
        plane.api.request("GET", "/version")
    plane.start_api_server()
    assert plane.url == url
    assert plane.api.request("GET", f"{CONFIG_MAPS}/kept")["metadata"]["name"] == "kept"


def test_an_ended_namespace_takes_its_objects_along_though_nothing_runs_to_do_it(plane: ControlPlane) -> None:
    api = plane.api
    api.request("POST", "/api/v1/namespaces", config_map("short"))
    api.request("POST", "/api/v1/namespaces/short/configmaps", config_map("inside"))
    plane.end_namespace("short")
    for path in ("/api/v1/namespaces/short", "/api/v1/namespaces/short/configmaps/inside"):
        with pytest.raises(ApiError) as refusal:
            api.request("GET", path)
        assert refusal.value.status == 404


def test_with_controllers_children_of_a_deleted_owner_are_collected(binaries: Path) -> None:
    with ControlPlane(binaries, controllers=True) as plane:
        api = plane.api
        owner = api.request("POST", CONFIG_MAPS, config_map("owner"))
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
        api.request("POST", CONFIG_MAPS, config_map("child", ownerReferences=[reference]))
        api.request("DELETE", f"{CONFIG_MAPS}/owner")
        assert poll(lambda: not api.answers(f"{CONFIG_MAPS}/child"), 60)


def test_a_port_lost_to_another_program_is_made_good_by_other_ports(
    binaries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        offers = iter([[busy.getsockname()[1], *controlplane._free_ports(1)], controlplane._free_ports(2)])
        monkeypatch.setattr(controlplane, "_free_ports", lambda _: next(offers))
        with ControlPlane(binaries) as plane:
            assert plane.api.answers("/readyz")


def test_no_process_outlives_a_killed_parent_and_the_next_one_clears_its_folder(binaries: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from localcluster.controlplane import ControlPlane\n"
        "plane = ControlPlane(Path(sys.argv[1])); plane.start()\n"
        "print(plane.folder, *(p.pid for p in plane._processes.values()), flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(controlplane.__file__).parent.parent)}
    command = [sys.executable, "-c", program, str(binaries)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        folder, *pids = parent.stdout.readline().split()
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        parent.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    assert poll(lambda: not any(_alive(pid) for pid in pids), 60)
    assert Path(folder).exists()
    ControlPlane(binaries).stop()
    assert not Path(folder).exists()


def _alive(pid: str) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
