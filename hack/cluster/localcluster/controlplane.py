"""The control plane alone: etcd and a real API server as ordinary processes, for tests that need no node.

It needs no root, listens on free loopback ports, keeps everything in a temporary folder, is ready in seconds,
and none of its processes outlives the one that started it, however that one ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import keys, kubeconfig
from .api import Api, poll
from .errors import ClusterError

ETCD, API_SERVER, CONTROLLERS = "etcd", "kube-apiserver", "kube-controller-manager"
ISSUER = "https://kubernetes.default.svc.cluster.local"
GOGC = 400  # percent of new memory at which garbage is collected: a few hundred MB more, an eighth less CPU
_TRIES = 3
_FOLDER = "outrider-control-plane-"


class ControlPlane:
    """A running control plane; `with ControlPlane(binaries) as plane:` starts and stops it.

    `binaries` holds etcd, kube-apiserver, kubectl …; with `controllers` kube-controller-manager runs too
    (children of deleted owners are collected, Deployments get ReplicaSets, namespaces end; without it the
    aggregated roles admin, edit and view stay empty).
    RBAC is on; `api` and `kubeconfig` are a cluster admin's.
    """

    def __init__(self, binaries: Path, *, controllers: bool = False) -> None:
        self._binaries = binaries
        self._controllers = controllers
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # a child asks the kernel to be killed when the *thread* that made it ends: so one thread makes them all
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="control-plane")
        _remove_folders_of_the_dead()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        self._token = secrets.token_hex(16)
        self._tokens_file = kubeconfig.write_secret(
            self.folder / "tokens.csv", f'{self._token},admin,admin,"system:masters"\n'
        )
        self._authority = keys.authority(self.folder)
        self._signing_key = keys.signing_key(self.folder / "sa.key")
        self.kubeconfig = self.folder / "admin.kubeconfig"

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._api_port}"

    @property
    def ca_file(self) -> Path:
        """What clients verify the server with: its own self-signed certificate, kept across restarts."""
        return self.folder / "pki" / "apiserver.crt"

    @property
    def api(self) -> Api:
        return Api(self.url, self.ca_file, self._token)

    # -- life ------------------------------------------------------------------------------------

    def start(self, seconds: float = 60) -> None:
        """Returns when the API server is ready and, with controllers, they work."""
        try:
            for remaining in reversed(range(_TRIES)):
                self._etcd_port, self._api_port = _free_ports(2)
                try:
                    self._launch(ETCD)
                    self.start_api_server(seconds)
                    break
                except ClusterError:
                    # between choosing a free port and using it, another program may have taken it
                    if not remaining or not self._lost_port():
                        raise
                    self._end_all()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends every process and removes the folder; may be called twice."""
        self._end_all()
        self._starter.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_api_server(self, seconds: float = 60) -> None:
        """On the same port, over the same etcd; returns when it is ready."""
        self._launch(API_SERVER)
        self._wait("API server", "/readyz", seconds)
        self._wait("default namespace", "/api/v1/namespaces/default", seconds)
        user = {"token": self._token}
        kubeconfig.write_secret(self.kubeconfig, kubeconfig.render(self.url, self.ca_file, user))
        if self._controllers:
            self._end(CONTROLLERS)  # its watches would wait out the back-off of what they missed
            self._launch(CONTROLLERS)
            self._wait("controllers", "/api/v1/namespaces/default/serviceaccounts/default", seconds)

    def pids(self) -> dict[str, int]:
        """Of each process, by the program's name."""
        return {name: process.pid for name, process in self._processes.items()}

    def kill_api_server(self) -> None:
        """SIGKILL: every connection and watch breaks at once. etcd keeps what was written."""
        self._end(API_SERVER)

    def restart_api_server(self) -> None:
        self.kill_api_server()
        self.start_api_server()

    # -- users -----------------------------------------------------------------------------------

    def kubeconfig_for(self, user: str, *groups: str, namespace: str = "default") -> Path:
        """A kubeconfig that authenticates as `user` in `groups`, by certificate: no rights but what RBAC grants."""
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="user-"))
        certificate, key = keys.client(folder, self._authority, user, groups)
        credentials = {"client-certificate": str(certificate), "client-key": str(key)}
        text = kubeconfig.render(self.url, self.ca_file, credentials, namespace)
        return kubeconfig.write_secret(folder / "kubeconfig", text)

    def kubeconfig_for_service_account(self, namespace: str, name: str) -> Path:
        """A kubeconfig with a token of that ServiceAccount (it must exist), as its pods would hold it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        answer = self.api.request("POST", path, {"spec": {"expirationSeconds": 86400}})
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="user-"))
        text = kubeconfig.render(self.url, self.ca_file, {"token": answer["status"]["token"]}, namespace)
        return kubeconfig.write_secret(folder / "kubeconfig", text)

    def kubectl(self, *arguments: str, input: str | None = None, kubeconfig: Path | None = None) -> str:
        """kubectl's standard output, as admin or with `kubeconfig`. Raises ClusterError with its standard error."""
        command = [str(self._binaries / "kubectl"), "--kubeconfig", str(kubeconfig or self.kubeconfig), *arguments]
        result = subprocess.run(command, input=input, capture_output=True, text=True, timeout=60, env=self._environment)
        if result.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {result.stderr.strip()}")
        return result.stdout

    def end_namespace(self, name: str) -> None:
        """Remove a namespace and all in it. Without controllers nobody else would: this does their part."""
        api = self.api
        if not self._controllers:
            api.delete(_collections(api, name), {"propagationPolicy": "Background"})
        answer = api.request("DELETE", f"/api/v1/namespaces/{name}")
        if not self._controllers:
            answer["spec"]["finalizers"] = []
            api.request("PUT", f"/api/v1/namespaces/{name}/finalize", answer)

    # -- processes -------------------------------------------------------------------------------

    @property
    def _environment(self) -> dict[str, str]:
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(self.folder), "GOGC": str(GOGC)}

    def _arguments(self, name: str) -> list[str]:
        etcd, folder = f"http://127.0.0.1:{self._etcd_port}", self.folder
        match name:
            case "etcd":
                return [f"--data-dir={folder}/etcd", "--unsafe-no-fsync", "--log-level=warn",
                        f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
                        "--listen-peer-urls=http://127.0.0.1:0"]  # fmt: skip
            case "kube-apiserver":
                # no reconciler: a loopback address may not be the endpoint of the `kubernetes` Service
                return [f"--etcd-servers={etcd}", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
                        "--endpoint-reconciler-type=none", f"--secure-port={self._api_port}",
                        f"--cert-dir={folder}/pki", f"--token-auth-file={self._tokens_file}",
                        f"--client-ca-file={self._authority[0]}", "--authorization-mode=Node,RBAC",
                        "--service-cluster-ip-range=10.96.0.0/16", "--allow-privileged",
                        f"--service-account-issuer={ISSUER}", f"--service-account-key-file={self._signing_key}",
                        f"--service-account-signing-key-file={self._signing_key}"]  # fmt: skip
            case "kube-controller-manager":
                return [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--secure-port=0",
                        f"--service-account-private-key-file={self._signing_key}",
                        f"--root-ca-file={self.ca_file}"]  # fmt: skip
        raise ValueError(name)

    def _launch(self, name: str) -> None:
        command = ["setpriv", "--pdeathsig", "KILL", str(self._binaries / name), *self._arguments(name)]

        def start() -> subprocess.Popen[bytes]:
            with self._log(name).open("ab") as log:
                return subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                    env=self._environment, start_new_session=True,
                )  # fmt: skip

        try:
            self._processes[name] = self._starter.submit(start).result()
        except FileNotFoundError:
            raise ClusterError("setpriv is missing: install util-linux") from None

    def _wait(self, what: str, path: str, seconds: float) -> None:
        def probe() -> bool:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise ClusterError(f"{name} ended with {process.returncode}: {self._last_words(name)}")
            return self.ca_file.exists() and self.api.answers(path)

        if not poll(probe, seconds):
            raise ClusterError(f"{what} not ready after {seconds:.0f} s: {self._last_words(API_SERVER)}")

    def _end(self, name: str) -> None:
        if process := self._processes.pop(name, None):
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _end_all(self) -> None:
        for name in (CONTROLLERS, API_SERVER, ETCD):
            self._end(name)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _last_words(self, name: str) -> str:
        log = self._log(name)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return " / ".join(lines[-3:]) or "its log is empty"

    def _lost_port(self) -> bool:
        logs = [self._log(name) for name in (ETCD, API_SERVER)]
        return any("address already in use" in log.read_text(errors="replace") for log in logs if log.exists())


def _remove_folders_of_the_dead() -> None:
    """What a killed process could not remove itself; etcd alone takes 64 MB each time."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        if not Path("/proc", folder.name.removeprefix(_FOLDER).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _collections(api: Api, namespace: str) -> list[str]:
    """The paths of all collections in `namespace` that can be deleted as a whole (KEP-3352, aggregated discovery)."""
    accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    answers: Sequence[dict[str, Any]] = [api.request("GET", root, accept=accept) for root in ("/api", "/apis")]
    paths = []
    for group in (item for answer in answers for item in answer["items"]):
        name = group["metadata"].get("name", "")
        version = group["versions"][0]  # the preferred one; the others show the same objects
        root = f"/apis/{name}" if name else "/api"
        paths += [
            f"{root}/{version['version']}/namespaces/{namespace}/{resource['resource']}"
            for resource in version.get("resources", [])
            if resource["scope"] == "Namespaced" and "deletecollection" in resource["verbs"]
        ]
    return paths
