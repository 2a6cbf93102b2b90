"""TCP sockets between ranks: where one listens, and how soon a cut cable is noticed."""

from __future__ import annotations

import errno
import socket

from stagelink.errors import ConnectError
from stagelink.transport.addresses import Address, family_of
from stagelink.transport.interrupts import stops_caller

BACKLOG = 4096
"""Connections that may wait to be accepted: a large job's come all at once."""

_USER_TIMEOUT_MS = 10_000


def listen(address: Address, ports: tuple[int, int] | None, key: str) -> socket.socket:
    """Listen at an address of this host, on the first port of a range that is free, or on any.

    Args:
        address: where.
        ports: the first and the last of the range; None: any port.
        key: where the range was given, for errors: ``"[control] ports"``.

    Raises:
        ConnectError: no port of the range is free, or the address cannot be listened at.
    """
    family = family_of(address.text)
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return socket.create_server((address.text, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if stops_caller(error):
                raise
            if ports is None or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConnectError(
                    f"cannot listen at {address.text} ({address.reason}): {error}"
                ) from error
    raise ConnectError(
        f"no port from {first} to {last} ({key}) is free at {address.text}; every rank "
        "of this host that listens takes one: widen the range, or end what holds them"
    )


def tune(sock: socket.socket) -> None:
    """Have a TCP socket send at once, and fail within ten seconds of a cut cable.

    That gives no end of file: unacknowledged data and probes must. A Unix socket is left alone.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
