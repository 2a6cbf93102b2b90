"""What this process listens at, and which of its ports the kernel keeps shut."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Listener", "listeners"]

_LISTENS = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
_FILTER = (socket.SOL_SOCKET, 26)
"""Asked for, it is how many instructions the socket's filter has."""


class Listener(NamedTuple):
    """A listening TCP socket: where, and whether a filter drops what comes."""

    host: str
    port: int
    shut: bool


def listeners() -> list[Listener]:
    """Those of this process, in no order; one of which there are several handles counts once."""
    found = set()
    for sock in _sockets():
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(*_LISTENS):
                host, port = sock.getsockname()[:2]
                found.add(Listener(host, port, bool(sock.getsockopt(*_FILTER))))
    return list(found)


def _sockets() -> Iterator[socket.socket]:
    """Handles of our own for the sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it is closed by now, as that which listed the folder is
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield socket.socket(fileno=os.dup(int(name)))
