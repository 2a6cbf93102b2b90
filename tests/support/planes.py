"""Control planes joined by hand, without store or meeting."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagelink.control.plane import Plane

__all__ = ["join"]


def join(one: Plane, other: Plane) -> tuple[socket.socket, socket.socket]:
    """Connect two planes as if they had met; the socket of each."""
    pair = socket.socketpair()
    for plane, peer, sock in zip((one, other), (other, one), pair, strict=True):
        connection = plane.adopt(sock)
        connection.greeted = True
        plane.introduce(connection, peer.rank)
    return pair
