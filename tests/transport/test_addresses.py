"""At which address others reach this host: on a network of the test's making, and on the real one.

What depends on real interfaces is tried on hosts of the tests' own, see ``tests/exchange``.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from stagelink.errors import ConnectError
from stagelink.transport import addresses
from stagelink.transport.addresses import (
    Address,
    address_of,
    check_reachable,
    is_loopback,
    own_address,
    route_to,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
KEY = "[control] interface"
DEFAULT = "192.0.2.1"


# A named interface


@linux_only
def test_the_address_of_a_named_interface() -> None:
    assert address_of("lo", KEY) == ("127.0.0.1", "[control] interface = 'lo'")


@linux_only
def test_an_unknown_interface_is_refused_with_those_that_exist() -> None:
    wanted = (
        r"\[control\] interface = 'eht0': there is no such network interface; this host can use "
        r".*'lo' \(127\.0\.0\.1\).*: name one of these, or leave \[control\] interface out"
    )
    with pytest.raises(ConnectError, match=wanted):
        address_of("eht0", KEY)


def test_elsewhere_than_on_linux_an_interface_cannot_be_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "en0")])
    monkeypatch.setattr("stagelink.transport.addresses.sys.platform", "darwin")
    with pytest.raises(ConnectError, match=r"'en0': .* can be looked up on Linux only; leave"):
        address_of("en0", KEY)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("fd77::1", False),
    ],
)
def test_what_only_this_host_reaches(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback
    if loopback:
        with pytest.raises(ConnectError, match=rf"this one at {address} \(why\); name .* in KEY"):
            check_reachable(Address(address, "why"), "KEY")
    else:
        check_reachable(Address(address, "why"), "KEY")


# The host's own choice


@dataclass
class Network:
    """What a host finds: names, routes and interfaces."""

    names: dict[str, list[str]] = field(default_factory=dict)
    routes: dict[str, str] = field(default_factory=dict)
    interfaces: dict[str, str] = field(default_factory=dict)

    def resolved(self, host: str) -> list[str]:
        return self.names.get(host, [host] if host[0].isdigit() else [])

    def route_to(self, address: str) -> str:
        if address not in self.routes:
            raise OSError("network is unreachable")
        return self.routes[address]

    def addresses(self) -> Iterator[tuple[str, str]]:
        yield from self.interfaces.items()

    def is_local(self, address: str) -> bool:
        return address in self.interfaces.values()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """A host whose name is mapped to 127.0.1.1, and which has no other address yet."""
    found = Network({"here": ["127.0.1.1"]}, {}, {"lo": "127.0.0.1"})
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    for name in ("resolved", "addresses", "is_local"):
        monkeypatch.setattr(addresses, f"_{name}", getattr(found, name))
    monkeypatch.setattr(addresses, "route_to", found.route_to)
    return found


def test_the_route_to_the_store_s_host_goes_before_all(network: Network) -> None:
    network.names |= {"here": ["10.1.0.1"], "master": ["10.9.0.9"]}
    network.interfaces |= {"eth0": "10.1.0.1", "ib0": "10.9.0.1"}
    network.routes |= {"10.9.0.9": "10.9.0.1", DEFAULT: "10.1.0.1"}
    assert own_address("master") == ("10.9.0.1", "the route to the store's host 'master'")
    assert own_address(None).text == "10.1.0.1"


def test_each_address_of_the_store_s_host_is_tried(network: Network) -> None:
    network.names["master"] = ["10.8.0.9", "fd77::9"]
    network.routes["fd77::9"] = "fd77::1"
    assert own_address("master").text == "fd77::1"


def test_a_store_on_this_host_says_nothing(network: Network) -> None:
    network.names |= {"here": ["10.1.0.1"], "localhost": ["127.0.0.1"]}
    network.interfaces["eth0"] = "10.1.0.1"
    network.routes["127.0.0.1"] = "127.0.0.1"
    assert own_address("localhost") == ("10.1.0.1", "this host's name 'here'")


def test_a_store_s_host_that_does_not_resolve_is_no_failure(network: Network) -> None:
    network.routes[DEFAULT] = "10.1.0.1"
    assert own_address("nowhere") == ("10.1.0.1", "the default route")


def test_an_address_of_the_name_that_no_interface_has_is_not_taken(network: Network) -> None:
    network.names["here"] = ["10.1.0.1", "10.1.0.2"]
    network.interfaces["eth0"] = "10.1.0.2"
    assert own_address(None).text == "10.1.0.2"


def test_the_only_interface_where_there_is_no_route(network: Network) -> None:
    network.interfaces["eth0"] = "10.1.0.1"
    assert own_address(None) == ("10.1.0.1", "its only interface 'eth0'")


def test_several_interfaces_and_nothing_to_tell_them_apart(network: Network) -> None:
    network.interfaces |= {"eth0": "10.1.0.1", "eth1": "10.2.0.1"}
    wanted = r"several addresses.*'eth0' \(10\.1\.0\.1\), 'eth1' \(10\.2\.0\.1\); name the interf"
    with pytest.raises(ConnectError, match=wanted):
        own_address(None)


def test_a_host_without_a_network_listens_to_itself(network: Network) -> None:
    assert own_address("nowhere") == ("127.0.0.1", "this host has no other")


def test_the_real_host_can_be_listened_on() -> None:
    address = own_address("localhost").text
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        assert server.getsockname()[1]
    assert route_to("127.0.0.1") == "127.0.0.1"
    assert route_to("127.0.0.1", "127.0.0.2") == "127.0.0.2"
