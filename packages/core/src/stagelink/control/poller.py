"""Waiting on many sockets, with a way to be woken from any thread."""

from __future__ import annotations

import select
import selectors
import socket
import time
from collections.abc import Callable

__all__ = ["Poller", "readable", "writable"]

_Ready = Callable[[int], None]
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Poller:
    """Sockets and what to call when they are ready.

    Attributes:
        spin_s: seconds that `run` polls before it blocks.
    """

    def __init__(self) -> None:
        self.spin_s = 0.0
        self._selector = selectors.EpollSelector()
        self._watcher = select.poll()
        self._watcher.register(self._selector.fileno(), select.POLLIN)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, _READ, self._on_wake)

    def add(self, sock: socket.socket, ready: _Ready) -> None:
        """Call ``ready(mask)`` whenever the socket can be read, or written if that is watched."""
        self._selector.register(sock, _READ, ready)

    def watch_writes(self, sock: socket.socket, *, wanted: bool) -> None:
        """Whether to call also when the socket can be written; in force at once."""
        if sock.fileno() >= 0:
            ready = self._selector.get_key(sock).data
            self._selector.modify(sock, _READ | (_WRITE if wanted else 0), ready)

    def remove(self, sock: socket.socket) -> None:
        """Forget a socket; silent when it is closed already."""
        if sock.fileno() >= 0:
            self._selector.unregister(sock)

    def run(self, timeout_s: float) -> None:
        """Call what is ready, after waiting up to ``timeout_s`` for something to be."""
        events = self._selector.select(0)
        if not events and timeout_s and self.spin_s:
            until = time.monotonic() + min(self.spin_s, timeout_s)
            while not events and time.monotonic() < until:
                events = self._selector.select(0)
        for key, mask in events or self._selector.select(timeout_s):
            key.data(mask)

    def watch(self) -> None:
        """Block until something is ready, and call nothing."""
        self._watcher.poll()

    def wake(self) -> None:
        """Make a blocked `run` or `watch` return; from any thread, also when nobody is in one."""
        try:
            self._wake_out.send(b"\0")
        except OSError:  # full: a wake-up is under way; closed: nobody is left to be woken
            return

    def _on_wake(self, mask: int) -> None:
        del mask
        try:
            self._wake_in.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give the descriptors back; the sockets that were added are their owners' to close."""
        self._wake_in.close()
        self._wake_out.close()
        self._selector.close()


def writable(mask: int) -> bool:
    """Whether a mask says that the socket can be written."""
    return bool(mask & _WRITE)


def readable(mask: int) -> bool:
    """Whether a mask says that the socket can be read."""
    return bool(mask & _READ)
