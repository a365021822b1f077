"""The /16 of one cluster: chosen so that it covers nothing the machine already reaches."""

from __future__ import annotations

import ipaddress
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any

from .errors import ClusterError

# private ranges least used by routers, VPNs and container engines first; 198.18/15 is for benchmarks (RFC 2544)
CANDIDATES = (
    *(f"10.{n}" for n in range(199, 251)),
    *(f"172.{n}" for n in range(31, 17, -1)),
    "198.18",
    "198.19",
)


@dataclass(frozen=True)
class Network:
    """`prefix` is the first two octets of a /16, like "10.199"."""

    prefix: str

    @property
    def block(self) -> str:
        return f"{self.prefix}.0.0/16"

    @property
    def host_ip(self) -> str:
        return f"{self.prefix}.0.1"

    @property
    def node_ip(self) -> str:
        return f"{self.prefix}.0.2"

    @property
    def pod_cidr(self) -> str:
        return f"{self.prefix}.1.0/24"

    @property
    def service_cidr(self) -> str:
        return f"{self.prefix}.2.0/24"

    @property
    def kubernetes_ip(self) -> str:
        """The Service `kubernetes`, always the first of the range."""
        return f"{self.prefix}.2.1"

    @property
    def api_url(self) -> str:
        return f"https://{self.node_ip}:6443"


@dataclass(frozen=True)
class Taken:
    """A network that the machine already reaches, and through which interface."""

    network: IPv4Network
    interface: str


def parse(text: str) -> Network:
    """'10.199' (or '10.199.0.0/16'). Raises ClusterError for anything else, or for a public network."""
    match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(\.0\.0/16)?", text)
    prefix = f"{match[1]}.{match[2]}" if match else ""
    try:
        block = IPv4Network(f"{prefix}.0.0/16")
    except ipaddress.AddressValueError:
        raise ClusterError(f"OUTRIDER_CLUSTER_NET={text!r} is no /16: use its first two octets, like 10.199") from None
    if not block.is_private or block.is_loopback or block.is_link_local:
        raise ClusterError(f"OUTRIDER_CLUSTER_NET={text!r} is not a private network: use one, like 10.199")
    return Network(prefix)


def taken(routes: Sequence[Mapping[str, Any]], addresses: Sequence[Mapping[str, Any]]) -> Iterator[Taken]:
    """What `ip -json route show table all` and `ip -json address` tell, less the default routes."""
    for route in routes:
        destination = route.get("dst", "default")
        if destination != "default" and ":" not in destination and route.get("type", "unicast") == "unicast":
            yield Taken(IPv4Network(destination, strict=False), route.get("dev", "a route"))
    for link in addresses:
        for address in link.get("addr_info", []):
            if address.get("family") == "inet":
                network = IPv4Network(f"{address['local']}/{address['prefixlen']}", strict=False)
                yield Taken(network, link["ifname"])


def choose(wanted: str | None, used: Sequence[Taken]) -> Network:
    """The wanted network, or the first candidate that overlaps nothing used. Raises ClusterError if there is none."""
    for prefix in [parse(wanted).prefix] if wanted else CANDIDATES:
        network = Network(prefix)
        block = IPv4Network(network.block)
        clash = next((each for each in used if each.network.prefixlen and each.network.overlaps(block)), None)
        if not clash:
            return network
        if wanted:
            raise ClusterError(
                f"network {network.block} is in use: {clash.interface} reaches {clash.network}; "
                "choose another by OUTRIDER_CLUSTER_NET, or unset it and a free one is taken"
            )
    raise ClusterError("no free network: every candidate /16 is in use; name one by OUTRIDER_CLUSTER_NET, like 10.199")


def used_here() -> list[Taken]:
    """What this machine reaches now."""
    routes, addresses = (
        json.loads(subprocess.run(["ip", "-json", *what], capture_output=True, text=True, check=True).stdout or "[]")
        for what in (["-4", "route", "show", "table", "all"], ["-4", "address", "show"])
    )
    return list(taken(routes, addresses))
