"""Waiting on many sockets, with a way to be woken from any thread."""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable

from stagelink.transport.interrupts import stops_caller

__all__ = ["Poller", "readable", "writable"]

_SHORT_WAITS = 3
"""So many waits in a row that were shorter than a spin, and the next one spins."""

_Ready = Callable[[int], None]


class Poller:
    """Sockets and what to call when they are ready.

    On Linux's epoll itself: a layer above it costs as much again for every message.

    Attributes:
        spin_s: seconds that `run` may poll before it blocks; how long is its own affair.
        on_due: called by `run` when the moment has come that `call_at` was given.
        dispatching: whether `run` is calling what is ready.
    """

    def __init__(self) -> None:
        self.spin_s = 0.0
        self.on_due: Callable[[], None] | None = None
        self._due_s = math.inf
        self._epoll = select.epoll()
        self._ready: dict[int, _Ready] = {}
        self._watcher = select.poll()
        self._watcher.register(self._epoll.fileno(), select.POLLIN)
        self._calls: deque[Callable[[], None]] = deque()
        self.dispatching = False
        self._waiting = False
        self._watching = False
        self._short_waits = 0
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self.add(self._wake_in, self._on_wake)

    def add(self, sock: socket.socket, ready: _Ready) -> None:
        """Call ``ready(mask)`` whenever the socket can be read, or written if that is watched."""
        self._ready[sock.fileno()] = ready
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def watch_writes(self, sock: socket.socket, *, wanted: bool) -> None:
        """Whether to call also when the socket can be written; in force at once."""
        if sock.fileno() >= 0:
            mask = select.EPOLLIN | (select.EPOLLOUT if wanted else 0)
            self._epoll.modify(sock.fileno(), mask)

    def remove(self, sock: socket.socket) -> None:
        """Forget a socket; silent when that was done already, or it is closed."""
        if sock.fileno() >= 0 and self._ready.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def call(self, ready: Callable[[], None]) -> None:
        """Call ``ready()`` in the next `run`, or in the one that is waiting; from any thread."""
        self._calls.append(ready)
        if self._waiting or self._watching:
            self.wake()

    def call_at(self, due_s: float) -> None:
        """Call `on_due` once at that moment of the monotonic clock, and at no other; inf: never.

        From any thread.
        """
        sooner, self._due_s = due_s < self._due_s, due_s
        if sooner and (self._waiting or self._watching):
            self.wake()

    @property
    def _left_s(self) -> float:
        """Until `on_due` is to be called."""
        return math.inf if self._due_s == math.inf else max(0.0, self._due_s - time.monotonic())

    def run(self, timeout_s: float) -> None:
        """Call what is ready, after waiting up to ``timeout_s`` for something to be.

        Where calls are due, sockets wait for the next run: to ask for them costs as much again.
        """
        events = [] if self._calls else self._wait(min(timeout_s, self._left_s))
        self.dispatching = True
        try:
            for descriptor, mask in events:
                ready = self._ready.get(descriptor)
                if ready is not None:  # else what came before it in this round has removed it
                    ready(mask)
            for _ in range(len(self._calls)):  # those that they lead to wait for the next run
                self._calls.popleft()()
            if self._left_s == 0.0:
                self._due_s = math.inf
                if self.on_due is not None:
                    self.on_due()
        finally:
            self.dispatching = False

    def _wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Wait for sockets; spin first where the last waits were so short that a spin meets it.

        To be woken costs more than a small message. But where waits are long, a spin only takes
        the core from those who are waited for.
        """
        began = time.monotonic()
        spin_s = min(self.spin_s, timeout_s)
        if self._short_waits >= _SHORT_WAITS:
            while time.monotonic() - began < spin_s:
                events = self._epoll.poll(0)
                if events or self._calls:
                    return events
                os.sched_yield()
            timeout_s -= spin_s
        events = self._block(timeout_s)
        if spin_s:
            short = time.monotonic() - began < spin_s
            self._short_waits = self._short_waits + 1 if short else 0
        return events

    def _block(self, timeout_s: float) -> list[tuple[int, int]]:
        self._waiting = True  # who calls for something from now on wakes us
        try:
            return self._epoll.poll(0 if self._calls else timeout_s)
        finally:
            self._waiting = False

    def watch(self) -> None:
        """Block until something is ready, and call nothing."""
        self._watching = True
        try:
            if not self._calls:
                left_s = self._left_s
                self._watcher.poll(None if left_s == math.inf else math.ceil(left_s * 1000))
        finally:
            self._watching = False

    def wake(self) -> None:
        """Make a blocked `run` or `watch` return; from any thread, also when nobody is in one."""
        try:
            self._wake_out.send(b"\0")
        except OSError as error:  # full: one is under way; closed: nobody is left to be woken
            if stops_caller(error):
                raise

    def _on_wake(self, mask: int) -> None:
        del mask
        try:
            self._wake_in.recv(4096)
        except BlockingIOError as error:
            if stops_caller(error):
                raise

    def close(self) -> None:
        """Give the descriptors back; the sockets that were added are their owners' to close."""
        self._wake_in.close()
        self._wake_out.close()
        self._epoll.close()


def writable(mask: int) -> bool:
    """Whether a mask says that the socket can be written."""
    return bool(mask & select.EPOLLOUT)


def readable(mask: int) -> bool:
    """Whether a mask says that the socket can be read, be it an error or the end."""
    return bool(mask & ~select.EPOLLOUT)
