"""Wake-ups that are kept for those who are not asleep yet: of one thread, and of an epoll."""

from __future__ import annotations

import socket
import threading

from stagelink.transport.interrupts import stops_caller

__all__ = ["Bell", "Waker"]


class Bell:
    """Wake-up call of one thread.

    Attributes:
        thread: whose it is.
    """

    __slots__ = ("_rung", "thread")

    def __init__(self, thread: int = 0) -> None:
        self.thread = thread
        self._rung = threading.Lock()
        self._rung.acquire(blocking=False)

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

    def heard(self) -> bool:
        """Whether it was rung since this, or `sleep`, was last called; never blocks."""
        return self._rung.acquire(blocking=False)


class Waker:
    """Socket that can be read when somebody has called `wake`.

    Attributes:
        sock: for an epoll.
        woken: whether a wake-up is pending that has not been heard; no other is needed.
    """

    def __init__(self) -> None:
        self.sock, self._out = socket.socketpair()
        self.sock.setblocking(False)
        self._out.setblocking(False)
        self.woken = False

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
