"""The command line of every component: pure, so that one file tells how the cluster is set up."""

from __future__ import annotations

from .controlplane import ISSUER
from .network import Network
from .paths import Place

NODE = "outrider"
# kube-apiserver writes the certificate that these check it by; without it they exit at once
NEED_CERTIFICATE = frozenset({"kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns"})


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
            f"--etcd-servers={etcd}", "--secure-port=6443", f"--advertise-address={network.node_ip}",
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
