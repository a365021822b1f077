"""The choice of a cluster's network."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest
from localcluster import network
from localcluster.errors import ClusterError
from localcluster.network import CANDIDATES, Network, Taken


def used(*blocks: str) -> list[Taken]:
    return [Taken(IPv4Network(block), "eth9") for block in blocks]


def test_the_first_candidate_is_taken_on_an_ordinary_machine() -> None:
    assert network.choose(None, used("192.168.1.0/24", "172.17.0.0/16")) == Network("10.199")


@pytest.mark.parametrize(
    ("blocks", "chosen"),
    [
        (["10.199.0.0/16"], "10.200"),
        (["10.199.4.0/30", "10.200.0.1/32"], "10.201"),
        (["10.0.0.0/8"], "172.31"),
        (["10.0.0.0/8", "172.16.0.0/12"], "198.18"),
        (["0.0.0.0/0"], "10.199"),
    ],
)
def test_a_candidate_that_overlaps_a_known_network_is_passed_over(blocks: list[str], chosen: str) -> None:
    assert network.choose(None, used(*blocks)).prefix == chosen


def test_a_wanted_network_in_use_is_refused_with_who_uses_it() -> None:
    with pytest.raises(
        ClusterError, match=r"10\.50\.0\.0/16 is in use: eth9 reaches 10\.50\.3\.0/24.*OUTRIDER_CLUSTER_NET"
    ):
        network.choose("10.50", used("10.50.3.0/24"))


def test_no_candidate_left_is_said() -> None:
    with pytest.raises(ClusterError, match="no free network"):
        network.choose(None, used("10.0.0.0/8", "172.16.0.0/12", "198.18.0.0/15"))


@pytest.mark.parametrize("text", ["", "10", "10.300", "10.1.2", "8.8", "127.0", "169.254", "ten.one", "10.1.0.0/24"])
def test_what_is_no_private_slash_16_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="OUTRIDER_CLUSTER_NET="):
        network.parse(text)


@pytest.mark.parametrize("text", ["10.7", "10.7.0.0/16"])
def test_a_wanted_network_may_be_written_two_ways(text: str) -> None:
    assert network.parse(text) == Network("10.7")


@pytest.mark.parametrize("prefix", CANDIDATES)
def test_every_candidate_is_a_network_that_a_user_could_name(prefix: str) -> None:
    assert network.parse(prefix).prefix == prefix


def test_routes_and_addresses_of_the_machine_count_as_used_and_default_routes_do_not() -> None:
    routes = [
        {"dst": "default", "dev": "eth0"},
        {"dst": "10.8.0.0/24", "dev": "tun0"},
        {"dst": "192.168.7.9", "dev": "eth0"},
        {"type": "broadcast", "dst": "172.31.255.255", "dev": "eth0"},
    ]
    addresses = [
        {"ifname": "eth0", "addr_info": [{"family": "inet", "local": "172.20.0.5", "prefixlen": 16}]},
        {"ifname": "lo", "addr_info": [{"family": "inet6", "local": "::1", "prefixlen": 128}]},
    ]
    assert list(network.taken(routes, addresses)) == [
        Taken(IPv4Network("10.8.0.0/24"), "tun0"),
        Taken(IPv4Network("192.168.7.9/32"), "eth0"),
        Taken(IPv4Network("172.20.0.0/16"), "eth0"),
    ]


def test_all_parts_of_a_network_lie_in_it_and_apart() -> None:
    net = Network("10.42")
    parts = [IPv4Network(part) for part in (f"{net.host_ip}/32", f"{net.node_ip}/32", net.pod_cidr, net.service_cidr)]
    assert all(part.subnet_of(IPv4Network(net.block)) for part in parts)
    assert not any(a.overlaps(b) for a in parts for b in parts if a is not b)
    assert IPv4Network(net.kubernetes_ip).subnet_of(IPv4Network(net.service_cidr))
