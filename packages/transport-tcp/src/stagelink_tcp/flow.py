"""One socket, one direction: payloads, or their parts, one after the other, without ever waiting.

No thread of its own: what a socket does not take or give at once goes on when core's reader says
that it is ready.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from stagelink.transport.interrupts import stops_caller

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from stagelink.transport.contract import Port
    from stagelink_tcp.parts import Told

__all__ = ["Flow"]

_SHARE_BYTES = 1024 * 1024
"""Moved at a time, in about 0.2 ms: everybody's messages wait for the reading thread."""


class Flow:
    """One direction of one connection.

    Args:
        port: of the link.
        sock: connected; owned from now on.
        sends: whether it sends.
    """

    def __init__(self, port: Port, sock: socket.socket, *, sends: bool) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._port = port
        self._sends = sends
        self._call: Callable[[memoryview], int] = sock.send if sends else sock.recv_into
        # A message begins on one thread while another may still be told that the socket is ready.
        self._lock = threading.Lock()
        self._left: memoryview | None = None
        self._told: Told | None = None
        self._watched = False

    def put(self, data: memoryview) -> memoryview:
        """Move what goes at once of a part that is not started yet; what is left of it.

        Raises:
            OSError: the connection is broken.
        """
        return self._moved(data)

    def start(self, part: memoryview, told: Told) -> None:
        """Move a part: what goes at once here, the rest on the reading thread.

        ``told`` hears that all of it is through, or why not, and perhaps in this call; the next
        part may start then.
        """
        with self._lock:
            self._left, self._told = part, told
            tell = self._go_on()
        if tell is not None:
            tell()

    def _ready(self) -> bool:
        with self._lock:
            tell = None
            if self._left is None:  # the part was through before the socket said so
                self._watched = False
                self._port.unwatch(self._sock.fileno())
            else:
                tell = self._go_on()
        if tell is not None:
            tell()
        return False  # the socket says when to go on

    def _go_on(self) -> Callable[[], object] | None:
        """With the lock: move a share; what is to be called without it, if anything."""
        left, told = self._left, self._told
        if left is None or told is None:
            return None
        error: OSError | None = None
        try:
            left = self._moved(left)
        except OSError as broken:
            if stops_caller(broken):
                raise
            error = broken
        if left and error is None:
            self._left = left
            if not self._watched:
                self._watched = True
                self._port.watch(self._sock.fileno(), self._ready, writable=self._sends)
            return None
        # Watched for now: in a stream the next part is here before the socket is ready again.
        self._left = self._told = None
        return told if error is None else partial(told.failed, error)

    def _moved(self, left: memoryview) -> memoryview:
        """Move a share, or less where the socket is not ready; what is left."""
        share = _SHARE_BYTES
        while left and share > 0:
            try:
                count = self._call(left[:share])
            except BlockingIOError as error:
                if stops_caller(error):
                    raise
                break
            if not count:
                raise ConnectionError("the other end has closed the connection")
            left = left[count:]
            share -= count
        return left

    def close(self) -> None:
        """Close the connection; what the system has taken to send still goes."""
        self._sock.close()
