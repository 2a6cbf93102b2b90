"""Control planes joined by hand, without store or meeting."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagelink.control.plane import Plane

__all__ = ["join"]


def join(
    one: Plane, other: Plane, *, hands_over: bool = False
) -> tuple[socket.socket, socket.socket]:
    """Connect two planes as if they had met; the socket of each.

    Args:
        one: a plane.
        other: another.
        hands_over: as between ranks of one process, without the sockets but for the end.
    """
    pair = socket.socketpair()
    connections = []
    for plane, peer, sock in zip((one, other), (other, one), pair, strict=True):
        connection = plane.door.adopt(sock)
        connection.greeted = True
        plane.door.introduce(connection, peer.rank)
        connections.append(connection)
    if hands_over:
        connections[0].hand_to(connections[1].number)
        connections[1].hand_to(connections[0].number)
    return pair
