"""Which server and which process this is, its memory, and at which address others reach it."""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

from stagelink.errors import ConnectError

__all__ = ["address_of", "memory_bytes", "process_id", "server_id"]

_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
# An address for documentation: asking for the route to it sends nothing.
_ELSEWHERE = ("192.0.2.1", 9)


def server_id() -> str:
    """A text that two processes have in common exactly when they are on one server.

    On Linux the kernel's boot id and the network namespace: containers with networks of their own
    are servers of their own, since neither Unix sockets nor loopback join them. Elsewhere the
    host's name. Read afresh at each call, so that a forked child is never told its parent's.
    """
    return f"{_boot_id()}/{_namespace('net')}"


def process_id() -> str:
    """A text that two threads have in common exactly when they are in one process.

    The server's with the process-id namespace and the process id, which alone may be equal in two
    containers that share a network.
    """
    return f"{server_id()}/{_namespace('pid')}/{os.getpid()}"


def memory_bytes() -> int | None:
    """How much memory this machine has; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return kind


def address_of(interface: str | None) -> str:
    """The IPv4 address to listen on for connections from other servers.

    Args:
        interface: name of a network interface, as ``"eth0"``. None: the address that this host's
            name resolves to, if an interface here has it and other servers can reach it; many
            systems map the name to 127.0.1.1, and then it is the address from which this host
            would send to others. A host without a network gets 127.0.0.1. May block while the
            name is resolved.

    Raises:
        ConnectError: there is no such interface, or it has no IPv4 address.
    """
    if interface is not None:
        return _interface_address(interface)
    for address in _addresses_of_name():
        if not address.startswith("127.") and _is_local(address):
            return address
    return _route_address()


def _interface_address(interface: str) -> str:
    existing = sorted(name for _, name in socket.if_nameindex())
    if interface not in existing:
        names = ", ".join(map(repr, existing))
        raise ConnectError(f"no network interface {interface!r} on this host; it has {names}")
    if sys.platform != "linux":
        raise ConnectError(
            f"the address of interface {interface!r} can be looked up on Linux only; "
            "leave `interface` out"
        )
    return _ask_kernel(interface)


def _ask_kernel(interface: str) -> str:
    import fcntl  # noqa: PLC0415 - Windows has none, and must be able to import this module

    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError as error:
            raise ConnectError(f"network interface {interface!r} has no IPv4 address") from error
    return socket.inet_ntoa(answer[20:24])


def _addresses_of_name() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def _is_local(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _route_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return _LOOPBACK
        return str(probe.getsockname()[0])
