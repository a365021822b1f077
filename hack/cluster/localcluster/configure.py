"""The configuration files of the components, rendered as values and then written."""

from __future__ import annotations

import json
import secrets
from typing import Any

from . import keys, kubeconfig
from .components import NODE
from .network import Network
from .paths import Place

PAUSE_IMAGE = "outrider.local/pause:1"
NO_EVICTION = {"memory.available": "100Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
               "imagefs.available": "0%", "imagefs.inodesFree": "0%"}  # fmt: skip


def kubelet(place: Place, network: Network) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{place.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{place.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        # the API server has no client certificate to show; the port is reachable from this cluster alone
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "clusterDNS": [network.node_ip],
        "clusterDomain": "cluster.local",
        "resolvConf": str(place.conf / "resolv.conf"),
        # a developer's disk may be fuller than kubelet likes; an image deleted for that could not be pulled again
        "evictionHard": NO_EVICTION,
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        "configMapAndSecretChangeDetectionStrategy": "Watch",
    }


def kube_proxy(place: Place, network: Network) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": network.pod_cidr,
        "hostnameOverride": NODE,
        "clientConnection": {"kubeconfig": str(place.kubeconfig)},
        # a network namespace may not write these sysctls
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": None, "tcpCloseWaitTimeout": None},
        "nftables": {"minSyncPeriod": "100ms"},
    }


def cni(network: Network) -> dict[str, Any]:
    return {
        "cniVersion": "0.4.0",
        "name": "outrider",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "hairpinMode": True,
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "dataDir": "/run/cni-ipam",
                    "ranges": [[{"subnet": network.pod_cidr}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def corefile(place: Place, network: Network) -> str:
    # without the last plugin unknown names are REFUSED, which resolvers take for a passing fault and repeat
    return f"""\
.:53 {{
    bind {network.node_ip}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {place.kubeconfig}
        pods insecure
        ttl 2
    }}
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
    cache 2
}}
"""


def containerd(place: Place) -> str:
    # restrict_oom_score_adj: no pod starts without it where root lacks CAP_SYS_RESOURCE
    return f"""\
version = 2
root = "{place.containerd}"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
[grpc]
address = "{place.containerd_socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{place.containerd}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{place.conf}/cni"
"""


def files(place: Place, network: Network) -> dict[str, str]:
    """The name of each file under conf/ and its text."""
    return {
        "kubelet.json": json.dumps(kubelet(place, network), indent=1),
        "kube-proxy.json": json.dumps(kube_proxy(place, network), indent=1),
        "cni/10-outrider.conflist": json.dumps(cni(network), indent=1),
        "Corefile": corefile(place, network),
        "containerd.toml": containerd(place),
        "resolv.conf": "",
    }


def write(place: Place, network: Network) -> str:
    """Write everything that the components read, with fresh tokens; returns the admin's."""
    admin, node = secrets.token_hex(16), secrets.token_hex(16)
    for folder in (place.conf / "pki", place.conf / "cni", place.logs, place.run, place.containerd):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files(place, network).items():
        (place.conf / name).write_text(text)
    users = f'{admin},admin,admin,"system:masters"\n{node},system:node:{NODE},{NODE},"system:nodes"\n'
    kubeconfig.write_secret(place.conf / "tokens.csv", users)
    for path, token in ((place.kubeconfig, admin), (place.conf / "kubelet.kubeconfig", node)):
        text = kubeconfig.render(network.api_url, place.certificate, {"token": token})
        kubeconfig.write_secret(path, text)
    keys.signing_key(place.conf / "pki" / "sa.key")
    return admin
