"""What the end-to-end tests lean on, on a real node: Services, DNS, rollouts, shutdown, GPUs, volumes, faults."""

from __future__ import annotations

import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from localcluster.api import poll
from localcluster.paths import Home

from .conftest import Cluster

pytestmark = [pytest.mark.node, pytest.mark.timeout(300)]
WEB = Path(__file__).parent / "web"
IMAGE = "localhost/outrider-test-web:1"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxies the machine has


def buildah(*words: str) -> str:
    home = Home.of()
    roots = ["--root", str(home.image_storage), "--runroot", str(home.image_run), "--storage-driver", "overlay"]
    return subprocess.run(["buildah", *roots, *words], capture_output=True, text=True, check=True).stdout


def build_image(context: Path, *, more: str = "") -> None:
    """The web image; `more` is added to its last layer."""
    busybox = shutil.which("busybox")
    assert busybox, "package busybox-static"
    context.mkdir(exist_ok=True)
    shutil.copy(busybox, context / "busybox")
    (context / "serve.sh").write_text((WEB / "serve.sh").read_text() + more)
    buildah("bud", "-q", "--layers", "--network", "none", "-t", IMAGE, "-f", str(WEB / "Containerfile"), str(context))


def answer(address: str) -> str:
    with DIRECT.open(f"http://{address}/", timeout=10) as response:
        text: str = response.read().decode()
    return text


@pytest.fixture(scope="module", autouse=True)
def image(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cluster up, the web image loaded; its build context."""
    context = tmp_path_factory.mktemp("context")
    build_image(context)
    cluster.do("up", "--gpus", "4")
    cluster.do("load-image", IMAGE)
    cluster.kubectl("apply", "-f", str(WEB / "web.yaml"))
    cluster.kubectl("rollout", "status", "deploy/web", "--timeout=180s")
    yield context
    buildah("rmi", "--force", IMAGE)


@pytest.fixture(scope="module")
def service(cluster: Cluster) -> str:
    return cluster.kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")


def test_the_host_reaches_a_service(service: str) -> None:
    assert answer(service).startswith("v1 web-")


def test_pods_find_a_service_by_its_name_and_unknown_names_fail_at_once(cluster: Cluster, service: str) -> None:
    name = "web.default.svc.cluster.local"
    assert service in cluster.kubectl("exec", "deploy/web", "--", "busybox", "nslookup", name)
    unknown = cluster.run("kubectl", "exec", "deploy/web", "--", "busybox", "nslookup", "hub.example.org")
    assert "NXDOMAIN" in unknown.stdout + unknown.stderr, "resolvers wait 5 s for what is not answered"


def test_pods_cannot_send_anything_outside(cluster: Cluster) -> None:
    said = cluster.run("kubectl", "exec", "deploy/web", "--", "busybox", "nc", "-w", "3", "192.0.2.1", "80")
    assert "unreachable" in said.stderr


def test_a_pod_that_wants_more_gpus_than_there_are_waits_and_is_told_why(cluster: Cluster) -> None:
    assert poll(lambda: "Insufficient nvidia.com/gpu" in cluster.kubectl("describe", "pod", "too-many-gpus"), 60)


def test_a_pod_reads_from_a_persistent_volume_that_is_a_folder_of_the_host(cluster: Cluster) -> None:
    done = "jsonpath={.status.phase}=Succeeded"
    cluster.kubectl("wait", f"--for={done}", "pod/reader", "--timeout=180s")
    assert cluster.kubectl("logs", "reader") == Path("/etc/hostname").read_text()


def test_only_what_changed_of_an_image_is_moved(cluster: Cluster, image: Path) -> None:
    build_image(image, more="# changed\n")
    moved = float(cluster.do("load-image", IMAGE).split(" MB moved")[0].rsplit(" ", 1)[1])
    assert 0 < moved < 0.1, "busybox alone is 2 MB"
    assert " 0.000 MB moved" in cluster.do("load-image", IMAGE)


def test_an_image_that_was_not_built_is_said_in_one_line(cluster: Cluster) -> None:
    refusal = cluster.run("load-image", "localhost/outrider-test-none:1")
    assert refusal.returncode == 1
    assert refusal.stderr.startswith("cluster: no image 'localhost/outrider-test-none:1' in buildah's storage")


@contextmanager
def requests_all_the_time(address: str) -> Iterator[list[str]]:
    """One request after another; what failed is in the list."""
    failed: list[str] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.02):
            try:
                answer(address)
            except (OSError, urllib.error.URLError) as error:
                failed.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield failed
    finally:
        ended.set()
        thread.join()


def test_a_rolling_update_fails_no_request(cluster: Cluster, service: str) -> None:
    with requests_all_the_time(service) as failed:
        cluster.kubectl("set", "env", "deploy/web", "VERSION=2")
        cluster.kubectl("rollout", "status", "deploy/web", "--timeout=180s")
        assert poll(lambda: answer(service).startswith("v2"), 60)
        assert poll(lambda: len(cluster.kubectl("get", "pods", "-l", "app=web", "-o", "name").split()) == 2, 60)
    assert failed == []


def test_a_deleted_pod_ends_in_its_own_time_after_its_hook(cluster: Cluster) -> None:
    pod = cluster.kubectl("get", "pods", "-l", "app=web", "-o", "jsonpath={.items[0].metadata.name}")
    with cluster.start("kubectl", "logs", "-f", pod) as log:
        assert log.stdout
        assert log.stdout.readline() == "serving v2\n"
        cluster.kubectl("delete", "pod", pod)
        assert log.communicate(timeout=90)[0] == "prestop\ndraining\nbye\n"


def test_pods_serve_on_and_the_cluster_works_after_any_component_is_killed(cluster: Cluster, service: str) -> None:
    cluster.kubectl("rollout", "status", "deploy/web", "--timeout=180s")
    with requests_all_the_time(service) as failed:
        for component in ("kubelet", "kube-proxy", "containerd", "kube-apiserver", "etcd"):
            cluster.do("kill", component, "KILL")
        ready = poll(lambda: not cluster.run("kubectl", "get", "--raw", "/readyz").returncode, 60, interval=0.5)
        assert ready, (cluster.place.logs / "node.log").read_text()
    assert failed == []
    assert poll(lambda: not cluster.run("kubectl", "rollout", "restart", "deploy/web").returncode, 60)
    cluster.kubectl("rollout", "status", "deploy/web", "--timeout=180s")
    assert answer(service).startswith("v2")
    assert "4 GPUs" in cluster.do("status")
    assert '"nvidia.com/gpu":"4"' in cluster.kubectl("get", "node", "-o", "jsonpath={.items[0].status.allocatable}")
