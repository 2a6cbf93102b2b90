"""Parts of a reader: wake-ups of threads and of its epoll, and descriptors that it watches.

Wake-ups are kept for those who are not asleep yet. The descriptors are those of transports: a
library's sockets, or its event descriptor. A transport's action is *progressed* by whichever
thread reads, so it needs no thread of its own.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from stagelink.deadline import Deadline
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.modes import outside_modes

_ACTION_S = 2.0
"""How long the end of a watch waits for an action, which must not take 1 ms."""

_MOMENT_S = 0.0002

Action = Callable[[], bool]


class Bell:
    """Wake-up call of one thread."""

    __slots__ = ("_rung", "heard", "thread")

    def __init__(self, thread: int = 0) -> None:
        self.thread = thread  # whose it is
        self._rung = threading.Lock()
        # called without blocking, whether it was rung since this, or `sleep`, was last called; in
        # C, as every wait asks
        self.heard: Callable[[], bool] = partial(self._rung.acquire, blocking=False)
        self.heard()

    def ring(self) -> None:
        """Wake its thread, or have its next `sleep` return at once; from any thread."""
        try:
            self._rung.release()
        except RuntimeError as error:  # it has been rung, and not heard yet
            if stops_caller(error):
                raise

    def sleep(self, timeout_s: float) -> bool:
        """Block until it is rung; False when time ran out. Signals interrupt it."""
        return self._rung.acquire(timeout=timeout_s)


class Waker:
    """Socket, for an epoll, that can be read when somebody has called `wake`."""

    def __init__(self) -> None:
        self.sock, self._out = socket.socketpair()
        self.sock.setblocking(False)
        self._out.setblocking(False)
        self.woken = False  # whether a wake-up has not been heard yet; no other is needed

    def wake(self) -> None:
        """Make the socket readable; from any thread."""
        if self.woken:
            return
        try:
            self.woken = True
            self._out.send(b"\0")
        except BaseException as error:
            self.woken = False
            if stops_caller(error) or not isinstance(error, OSError):
                raise  # else it is closed, and nobody is left to be woken

    def hear(self, _mask: int) -> None:
        """Read what `wake` has sent; what it was sent for is looked at after this."""
        try:
            self.sock.recv(4096)
        except BlockingIOError as error:
            if stops_caller(error):
                raise
        finally:
            self.woken = False

    def close(self) -> None:
        """Close both ends."""
        self.sock.close()
        self._out.close()


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """One wish to have a descriptor watched, see `Watches.begin`."""

    fd: int
    action: Action
    on_error: Callable[[BaseException], None]
    writable: bool


class Watches:
    """Descriptors that are watched, and for whom: registered with an epoll, and in ``ready``."""

    def __init__(self, epoll: select.epoll, ready: dict[int, Callable[[int], None]]) -> None:
        # actions to be called in the next turn, each with its descriptor
        self.due: dict[tuple[int, Action], None] = {}
        self._epoll = epoll
        self._ready = ready
        self._watches: dict[int, list[Watch]] = {}
        self._lock = threading.RLock()
        self._acting: tuple[int, int, Action] | None = None

    def begin(self, watch: Watch) -> None:
        """See `Reader.watch`."""
        fd = watch.fd
        with self._lock:
            watches = [*self._watches.get(fd, ()), watch]
            self._arm(fd, watches)
            self._watches[fd] = watches
            self._ready[fd] = partial(self._on_ready, fd)
        self.due[fd, watch.action] = None

    def end(self, watch: Watch) -> None:
        """See `Reader.unwatch`."""
        fd = watch.fd
        with self._lock:
            left = [other for other in self._watches.get(fd, ()) if other is not watch]
            if left:
                self._watches[fd] = left
                with suppress(OSError, ValueError):  # it, or the reader, is closed
                    self._arm(fd, left)
            elif self._watches.pop(fd, None) is not None:
                self._ready.pop(fd, None)
                with suppress(OSError, ValueError):
                    self._epoll.unregister(fd)
        until, here = Deadline(_ACTION_S), threading.get_ident()
        while (acting := self._acting) is not None and not until.passed:
            if acting[0] == here or acting[1:] != (fd, watch.action):
                break
            time.sleep(_MOMENT_S)

    def _arm(self, fd: int, watches: list[Watch]) -> None:
        mask = event_mask(writes=any(watch.writable for watch in watches))
        try:
            self._epoll.modify(fd, mask)
        except FileNotFoundError as error:  # it is new, or was closed
            if stops_caller(error):
                raise
            self._epoll.register(fd, mask)

    def _of(self, fd: int, action: Action) -> list[Watch]:
        return [watch for watch in self._watches.get(fd, ()) if watch.action == action]

    # -- on the reading thread

    def _on_ready(self, fd: int, mask: int) -> None:
        del mask
        for watch in self._watches.get(fd, ()):
            self.due[fd, watch.action] = None

    def act(self) -> None:
        """Call what is due, each action once; what becomes due thereby waits for the next turn."""
        for fd, action in tuple(self.due):
            self.due.pop((fd, action), None)
            watches: list[Watch] = []
            # First: `end` takes a watch away, and then looks here.
            self._acting = (threading.get_ident(), fd, action)
            try:
                watches = self._of(fd, action)  # the action may end them, and then raise
                if watches:
                    with outside_modes():
                        again = action()
                    if again:
                        self.due[fd, action] = None
            except BaseException as error:
                if stops_caller(error):
                    raise
                for watch in watches:
                    self.end(watch)
                    watch.on_error(error)
            finally:
                self._acting = None


def event_mask(*, writes: bool) -> int:
    """The events of a descriptor: input, and also room to write where that is wanted."""
    return select.EPOLLIN | (select.EPOLLOUT if writes else 0)
