"""The command line of every component: pure, so that one file tells how the cluster is set up."""

from __future__ import annotations

from .controlplane import ISSUER
from .network import Network
from .paths import Place

NODE = "outrider"
API_PORT = 6443
# these exit at once if the API server does not listen yet
NEED_API = frozenset({"kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns"})
# which programs start afresh with one that ended: left alone, their watches would back off for up to a minute
FOLLOWERS = {
    "etcd": frozenset({"kube-apiserver"}),
    "kube-apiserver": frozenset({"kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"}),
}


def arguments(place: Place, network: Network) -> dict[str, list[str]]:
    """Program to arguments, in the order in which they are started."""
    conf = place.conf
    kubeconfig = f"--kubeconfig={place.kubeconfig}"
    etcd = "http://127.0.0.1:2379"
    return {
        "etcd": [
            f"--data-dir={place.etcd}", "--unsafe-no-fsync", "--log-level=warn",
            f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
            "--listen-peer-urls=http://127.0.0.1:2380"],
        "kube-apiserver": [
            f"--etcd-servers={etcd}", f"--secure-port={API_PORT}", f"--advertise-address={network.node_ip}",
            f"--cert-dir={conf}/pki", f"--token-auth-file={conf}/tokens.csv", "--authorization-mode=Node,RBAC",
            f"--service-cluster-ip-range={network.service_cidr}", "--allow-privileged",
            f"--service-account-issuer={ISSUER}", f"--service-account-key-file={conf}/pki/sa.key",
            f"--service-account-signing-key-file={conf}/pki/sa.key",
            "--kubelet-preferred-address-types=InternalIP"],
        "containerd": ["--config", f"{conf}/containerd.toml"],
        "kube-controller-manager": [
            kubeconfig, "--leader-elect=false", f"--service-account-private-key-file={conf}/pki/sa.key",
            f"--root-ca-file={place.certificate}", "--bind-address=127.0.0.1"],
        "kube-scheduler": [kubeconfig, "--leader-elect=false", "--bind-address=127.0.0.1"],
        "kubelet": [
            f"--config={conf}/kubelet.json", f"--kubeconfig={conf}/kubelet.kubeconfig",
            f"--hostname-override={NODE}", f"--node-ip={network.node_ip}", "--cert-dir=/run/kubelet-pki"],
        "kube-proxy": [f"--config={conf}/kube-proxy.json"],
        "coredns": ["-conf", f"{conf}/Corefile"],
    }  # fmt: skip
