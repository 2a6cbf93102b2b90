"""Network addresses of this host, and the choice of the one that ranks of other servers reach."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from stagelink.errors import ConnectError

_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1
_DISCARD = 9
# Addresses for documentation: asking for the route to one sends nothing.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_IF_INET6 = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = 0x00
_NOT_USABLE = 0x08 | 0x40  # another host has it, or that is still being found out


class Address(NamedTuple):
    """An address of this host, IPv4 or IPv6, as text.

    Attributes:
        text: the address.
        reason: why this one, in words.
    """

    text: str
    reason: str


def family_of(address: str) -> socket.AddressFamily:
    """Family of an address, IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(address: str) -> bool:
    """Whether an address is one at which only this host reaches itself."""
    return ipaddress.ip_address(address).is_loopback


def check_reachable(address: Address, key: str) -> None:
    """Make sure that an address of this host is no loopback address, for ranks of other hosts.

    Raises:
        ConnectError: it is one; an interface can be named in ``key``.
    """
    if is_loopback(address.text):
        raise ConnectError(
            f"ranks of other hosts cannot reach this one at {address.text} ({address.reason}); "
            f"name an interface that they reach in {key}"
        )


def address_of(interface: str, key: str) -> Address:
    """The address of a network interface: its IPv4 address, else a global IPv6 address.

    Args:
        interface: its name, as ``"eth0"``.
        key: where the name was given, for errors: ``"[control] interface"``.

    Raises:
        ConnectError: there is no such interface, it is down, or it has no address; the text names
            those that there are.
    """
    if interface not in _interfaces():
        raise _wrong(interface, key, "there is no such network interface")
    if sys.platform != "linux":
        raise ConnectError(
            f"{key} = {interface!r}: the address of an interface can be looked up on Linux only; "
            f"leave {key} out"
        )
    if not _is_up(interface):
        raise _wrong(interface, key, "this network interface is down")
    address = _interface_address(interface)
    if address is None:
        raise _wrong(interface, key, "this network interface has no IPv4 or global IPv6 address")
    return Address(address, f"{key} = {interface!r}")


def own_address(store_host: str | None) -> Address:
    """The address at which ranks of other servers can reach this host, as far as it can tell.

    That from which it sends to the store's host; else the one that its own name resolves to, if an
    interface here has it; else that of its default route; else that of its only interface. Where
    all of these are loopback, as for a name that many systems map to 127.0.1.1, and on a host
    without a network, it is loopback. May block while names are resolved.

    Args:
        store_host: name or address of the host of the job's store; None: it has none.

    Raises:
        ConnectError: several interfaces have an address, and nothing tells which one it is.
    """
    if store_host is not None:
        for address in routes_to(store_host):
            if not is_loopback(address):
                return Address(address, f"the route to the store's host {store_host!r}")
    name = socket.gethostname()
    for address in _resolved(name):
        if not is_loopback(address) and _is_local(address):
            return Address(address, f"this host's name {name!r}")
    for elsewhere in _ELSEWHERE:
        for address in routes_to(elsewhere):
            return Address(address, "the default route")
    return _only_address()


def routes_to(host: str) -> Iterator[str]:
    """The addresses of this host from which it would send to another, by each of that one's."""
    for address in _resolved(host):
        with suppress(OSError):
            yield route_to(address)


def route_to(address: str, source: str | None = None) -> str:
    """The address of this host from which it would send to another; nothing is sent.

    Args:
        address: the other host's.
        source: the address of this host to send from; None: the kernel's choice.

    Raises:
        OSError: there is no route there, or none from ``source``.
    """
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        if source is not None:
            probe.bind((source, 0))
        probe.connect((address, _DISCARD))
        return str(probe.getsockname()[0])


def _only_address() -> Address:
    found = {name: address for name, address in _addresses() if not is_loopback(address)}
    if len(found) > 1:
        raise ConnectError(
            "this host has several addresses, and neither its name nor a route tells which one "
            f"ranks of other servers reach: {_listed(found)}; name the interface in [control] "
            "interface"
        )
    for name, address in found.items():
        return Address(address, f"its only interface {name!r}")
    return Address(_LOOPBACK, "this host has no other")


def _wrong(interface: str, key: str, what: str) -> ConnectError:
    return ConnectError(
        f"{key} = {interface!r}: {what}; this host can use {_listed(dict(_addresses()))}: name "
        f"one of these, or leave {key} out"
    )


def _listed(addresses: dict[str, str]) -> str:
    names = (f"{name!r} ({address})" for name, address in addresses.items())
    return ", ".join(names) or "none that is up and has an address"


def _interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def _addresses() -> Iterator[tuple[str, str]]:
    """The interfaces that can be used, with the address of each."""
    if sys.platform != "linux":
        return
    for name in _interfaces():
        if _is_up(name) and (address := _interface_address(name)) is not None:
            yield name, address


def _is_up(interface: str) -> bool:
    answer = _ask_kernel(interface, _SIOCGIFFLAGS)
    return answer is not None and bool(struct.unpack_from("H", answer, 16)[0] & _IFF_UP)


def _interface_address(interface: str) -> str | None:
    answer = _ask_kernel(interface, _SIOCGIFADDR)
    return _ipv6_of(interface) if answer is None else socket.inet_ntoa(answer[20:24])


def _ask_kernel(interface: str, question: int) -> bytes | None:
    import fcntl  # noqa: PLC0415 - Windows has none, and must be able to import this module

    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, question, request)
        except OSError:  # it has none, or is gone
            return None


def _ipv6_of(interface: str) -> str | None:
    try:
        lines = _IF_INET6.read_text(encoding="ascii").splitlines()
    except OSError:  # a kernel without IPv6
        return None
    for line in lines:
        digits, _, _, scope, flags, name = line.split()
        usable = int(scope, 16) == _GLOBAL_SCOPE and not int(flags, 16) & _NOT_USABLE
        if name == interface and usable:
            return str(ipaddress.IPv6Address(int(digits, 16)))
    return None


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [str(address[0]).partition("%")[0] for *_, address in found]


def _is_local(address: str) -> bool:
    with socket.socket(family_of(address), socket.SOCK_STREAM) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False
