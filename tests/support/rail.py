"""A messaging library with an event descriptor, as there are: for the guide's code to be run with.

Not thread-safe. Nothing is done but in `Worker.progress`, out of which callbacks are called. Once
armed, the descriptor becomes ready with whatever there is to do, what another thread starts
included; then it has to be armed again.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Endpoint", "Worker"]

Finished = Callable[[Exception | None], None]

_HEAD = struct.Struct("<QQ")
_SHARE_BYTES = 1 << 18
_IN, _OUT = select.EPOLLIN | select.EPOLLONESHOT, select.EPOLLOUT | select.EPOLLONESHOT


class Worker:
    """What makes progress, for one address and all endpoints.

    Attributes:
        address: for another worker's `connect`.
        fd: the event descriptor.
    """

    def __init__(self) -> None:
        self.address = uuid.uuid4().hex.encode()
        self._events = select.epoll()
        self.fd = self._events.fileno()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._events.register(self._bell, _IN)
        self._masks = {self._bell: _IN}
        self._work: dict[int, Callable[[], bool]] = {self._bell: self._answer_bell}
        self._sockets: list[socket.socket] = []
        self._posted: defaultdict[int, deque[tuple[memoryview, Finished]]] = defaultdict(deque)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(b"\0" + self.address)
        self._listener.listen()
        self.add(self._listener, _IN, self._accept)

    def connect(self, address: bytes) -> Endpoint:
        """The way to another worker."""
        return Endpoint(self, address)

    def receive(self, tag: int, buffer: memoryview, finished: Finished) -> None:
        """Receive the next message with a tag."""
        self._posted[tag].append((buffer, finished))
        self.ring()

    def progress(self) -> bool:
        """Do a share of what there is to do; whether there is more."""
        self._events.poll(0)
        return any([work() for work in list(self._work.values())])

    def arm(self) -> bool:
        """Have the descriptor become ready with what comes; False: there is something already."""
        for fd, mask in self._masks.items():
            if mask:
                self._events.modify(fd, mask)
        return not select.select([self.fd], [], [], 0)[0]

    def close(self) -> None:
        """Give everything back."""
        for sock in self._sockets:
            sock.close()
        os.close(self._bell)
        self._events.close()

    def ring(self) -> None:
        """Something was started."""
        os.eventfd_write(self._bell, 1)

    def add(self, sock: socket.socket, mask: int, work: Callable[[], bool]) -> None:
        """Have work done on a socket."""
        sock.setblocking(False)
        self._sockets.append(sock)
        self._work[sock.fileno()], self._masks[sock.fileno()] = work, mask
        self._events.register(sock, mask)

    def drop(self, sock: socket.socket) -> None:
        """Nothing goes by a socket any more."""
        del self._work[sock.fileno()], self._masks[sock.fileno()]
        self._events.unregister(sock)

    def want(self, sock: socket.socket, mask: int) -> None:
        """Have a socket's events looked at from the next `arm` on."""
        self._masks[sock.fileno()] = mask

    def posted(self, tag: int) -> tuple[memoryview, Finished] | None:
        """What a message with a tag is to be received into."""
        return self._posted[tag].popleft() if self._posted[tag] else None

    def _answer_bell(self) -> bool:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return False

    def _accept(self) -> bool:
        with suppress(BlockingIOError):
            incoming = _Incoming(self, self._listener.accept()[0])
            self.add(incoming.socket, _IN, incoming.work)
        return False


class Endpoint:
    """The way to another worker."""

    def __init__(self, worker: Worker, address: bytes) -> None:
        self._worker = worker
        self._queue: deque[tuple[memoryview, Finished]] = deque()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(b"\0" + address)
        worker.add(self._socket, 0, self._send)

    def send(self, tag: int, buffer: memoryview, finished: Finished) -> None:
        """Send a message; its buffer is read until it is finished."""
        self._queue.append((memoryview(_HEAD.pack(tag, len(buffer))), lambda _: None))
        self._queue.append((buffer, finished))
        self._worker.ring()

    def _send(self) -> bool:
        self._worker.want(self._socket, 0)
        if not self._queue:
            return False
        left, finished = self._queue.popleft()
        try:
            left = left[self._socket.send(left[:_SHARE_BYTES]) if left else 0 :]
        except BlockingIOError:
            self._queue.appendleft((left, finished))
            self._worker.want(self._socket, _OUT)
            return False
        except OSError as error:
            self._worker.drop(self._socket)
            finished(error)
            return False
        if left:
            self._queue.appendleft((left, finished))
        else:
            finished(None)
        return bool(self._queue)


class _Incoming:
    """Messages from one endpoint: a head, the payload, a head."""

    def __init__(self, worker: Worker, sock: socket.socket) -> None:
        self.socket = sock
        self._worker = worker
        self._head = bytearray(_HEAD.size)
        self._left = memoryview(self._head)
        self._finished: Finished | None = None

    def work(self) -> bool:
        """Receive a share; whether there may be more."""
        try:
            if self._left and not self._receive():
                return True
        except BlockingIOError:
            return False
        except OSError as error:
            self._worker.drop(self.socket)
            if self._finished is not None:
                self._finished(error)
            return False
        if self._finished is None:
            return self._match()
        finished, self._finished = self._finished, None
        self._left = memoryview(self._head)
        self._worker.want(self.socket, _IN)
        finished(None)
        return True

    def _receive(self) -> bool:
        count = self.socket.recv_into(self._left[:_SHARE_BYTES])
        if not count:
            raise ConnectionError("the other worker has gone")
        self._left = self._left[count:]
        return not self._left

    def _match(self) -> bool:
        """The head is there; its buffer, too?"""
        tag, size_bytes = _HEAD.unpack(self._head)
        posted = self._worker.posted(tag)
        if posted is None:
            self._worker.want(self.socket, 0)
            return False
        buffer, self._finished = posted
        self._left = buffer[:size_bytes]
        self._worker.want(self.socket, _IN)
        return True
