"""Which server and process this is, and where others reach it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from stagelink.errors import ConnectError
from stagelink.transport.host import address_of, memory_bytes, process_id, server_id

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@linux_only
def test_memory_is_what_the_kernel_says() -> None:
    first = Path("/proc/meminfo").read_text().splitlines()[0]
    assert memory_bytes() == int(first.split()[1]) * 1024


def test_a_system_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    assert memory_bytes() is None


def name_resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def getaddrinfo(*_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


class FakeSocket:
    """Stands in for the host's interfaces and its default route."""

    addresses: tuple[str, ...] = ()
    route: str | None = None

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> FakeSocket:
        return self

    def __exit__(self, *_: object) -> None: ...

    def bind(self, address: tuple[str, int]) -> None:
        if address[0] not in self.addresses:
            raise OSError("cannot assign requested address")

    def connect(self, address: object) -> None:
        if self.route is None:
            raise OSError("network is unreachable")

    def getsockname(self) -> tuple[str | None, int]:
        return self.route, 1


def has_addresses(monkeypatch: pytest.MonkeyPatch, *addresses: str, route: str | None) -> None:
    fake = type("Fake", (FakeSocket,), {"addresses": addresses, "route": route})
    monkeypatch.setattr(socket, "socket", fake)


# Who am I


def test_one_process_is_on_one_server() -> None:
    assert server_id() == server_id()
    assert process_id() == process_id()
    assert process_id().startswith(server_id())


@linux_only
def test_a_server_is_a_boot_and_a_network() -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert server_id() == f"{boot}/{os.readlink('/proc/self/ns/net')}"


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_child_is_another_process_on_the_same_server() -> None:
    before, read_end, write_end = process_id(), *os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, f"{server_id()} {process_id()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    server, process = os.read(read_end, 4096).decode().split()
    os.close(read_end)
    os.close(write_end)
    assert server == server_id()
    assert process != before
    assert process == before.removesuffix(str(os.getpid())) + str(child)


def test_without_proc_the_host_s_name_tells_servers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(os, "readlink", absent)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    assert server_id() == "node7/net"
    assert process_id() == f"node7/net/pid/{os.getpid()}"


# A named interface


@linux_only
def test_the_address_of_a_named_interface() -> None:
    assert address_of("lo") == "127.0.0.1"


def test_an_unknown_interface_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        ConnectError, match=r"no network interface 'eht0' on this host; it has .*'lo'"
    ):
        address_of("eht0")


@linux_only
def test_an_interface_without_an_ipv4_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "no-such-thing")])
    with pytest.raises(
        ConnectError, match="interface 'no-such-thing' has no IPv4 address"
    ) as caught:
        address_of("no-such-thing")
    assert isinstance(caught.value.__cause__, OSError)


def test_elsewhere_than_on_linux_an_interface_cannot_be_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "en0")])
    monkeypatch.setattr("stagelink.transport.host.sys.platform", "darwin")
    with pytest.raises(ConnectError, match="interface 'en0' can be looked up on Linux only"):
        address_of("en0")


# The host's own choice


def test_the_name_s_address_is_taken_where_an_interface_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name_resolves_to(monkeypatch, "198.51.100.7")
    has_addresses(monkeypatch, "198.51.100.7", route="203.0.113.1")
    assert address_of(None) == "198.51.100.7"


def test_a_name_that_maps_to_loopback_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    name_resolves_to(monkeypatch, "127.0.1.1")
    has_addresses(monkeypatch, "127.0.1.1", route="203.0.113.1")
    assert address_of(None) == "203.0.113.1"


def test_an_address_that_no_interface_has_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    name_resolves_to(monkeypatch, "198.51.100.7", "198.51.100.8")
    has_addresses(monkeypatch, "198.51.100.8", route="203.0.113.1")
    assert address_of(None) == "198.51.100.8"
    has_addresses(monkeypatch, route="203.0.113.1")
    assert address_of(None) == "203.0.113.1"


def test_a_name_that_does_not_resolve_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    has_addresses(monkeypatch, route="203.0.113.1")
    assert address_of(None) == "203.0.113.1"


def test_a_host_without_a_network_listens_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    name_resolves_to(monkeypatch, "127.0.0.1")
    has_addresses(monkeypatch, "127.0.0.1", route=None)
    assert address_of(None) == "127.0.0.1"


def test_the_real_host_can_be_listened_on() -> None:
    with socket.create_server((address_of(None), 0)) as server:
        assert server.getsockname()[1]
