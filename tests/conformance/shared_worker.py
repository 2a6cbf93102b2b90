"""A transport with one worker for all links of a rank, as libraries with an event descriptor have.

Core watches the worker's descriptor for each link, and makes its progress; no thread is needed.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from stagelink.transport.contract import (
    API_VERSION,
    Capabilities,
    Receiver,
    Sender,
    Transport,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.deadline import Deadline
    from stagelink.transport.contract import Announce, Done, Link, Message, Port
    from stagelink.transport.header import Header

PIECE_BYTES = 128 * 1024
SHARE = 64
"""Datagrams at a time: everybody's messages wait for the reading thread."""

_LINK = struct.Struct("!II")


@dataclass
class Request:
    """A message under way."""

    link: bytes
    left: memoryview
    done: Done
    to: bytes = b""


class Worker:
    """Moves the datagrams of all links. Thread-safe."""

    def __init__(self) -> None:
        self.address = b"\0stagelink-test-" + secrets.token_hex(8).encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._events = select.epoll()
        for fd in (self._socket.fileno(), self._wake):
            self._events.register(fd, select.EPOLLIN)
        self.fd = self._events.fileno()
        self._lock = threading.Lock()
        self._sends: deque[Request] = deque()
        self._receives: dict[bytes, deque[Request]] = defaultdict(deque)
        self._early: dict[bytes, deque[bytes]] = defaultdict(deque)

    def send(self, request: Request) -> None:
        with self._lock:
            self._sends.append(request)
        os.eventfd_write(self._wake, 1)

    def receive(self, request: Request) -> None:
        with self._lock:
            self._receives[request.link].append(request)
        os.eventfd_write(self._wake, 1)  # pieces may be here

    def drop(self, link: bytes) -> None:
        with self._lock:
            self._sends = deque(one for one in self._sends if one.link != link)
            self._receives[link].clear()

    def progress(self) -> bool:
        """Move a share; whether there is more to do, which no descriptor tells of."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with self._lock:
            done = [*self._read(), *self._write()]
            more = bool(self._sends)
        for request, error in done:
            if error is None:
                request.done()
            else:
                request.done.failed(error)
        return more

    def close(self) -> None:
        self._events.close()
        self._socket.close()
        os.close(self._wake)

    def _read(self) -> list[tuple[Request, None]]:
        for _ in range(SHARE):
            try:
                piece = self._socket.recv(_LINK.size + PIECE_BYTES)
            except BlockingIOError:
                break
            self._early[piece[: _LINK.size]].append(piece[_LINK.size :])
        done: list[tuple[Request, None]] = []
        for link, waiting in self._receives.items():
            while waiting and (not waiting[0].left or self._early[link]):
                request = waiting[0]
                if request.left:
                    piece = self._early[link].popleft()
                    request.left[: len(piece)] = piece
                    request.left = request.left[len(piece) :]
                if not request.left:
                    done.append((waiting.popleft(), None))
        return done

    def _write(self) -> list[tuple[Request, OSError | None]]:
        done: list[tuple[Request, OSError | None]] = []
        for _ in range(SHARE):
            if not self._sends:
                break
            request = self._sends[0]
            try:
                if request.left:
                    piece = request.left[:PIECE_BYTES]
                    self._socket.sendto(request.link + bytes(piece), request.to)
                    request.left = request.left[len(piece) :]
            except BlockingIOError:
                break
            except OSError as error:
                done.append((self._sends.popleft(), error))
                continue
            if not request.left:
                done.append((self._sends.popleft(), None))
        return done


def link_of(port: Port) -> bytes:
    return _LINK.pack(port.link.source, port.link.target)


class WorkerSender(Sender):
    def __init__(self, port: Port, worker: Worker) -> None:
        self._port = port
        self._worker = worker
        self._link = link_of(port)
        self._to = b""
        port.watch(worker.fd, worker.progress)

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        if not self._to:
            return False
        announce()
        view = message.payload.numpy().data
        self._worker.send(Request(self._link, view, done, self._to))
        return True

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self._to = note
        self._port.room()

    def abort(self, cause: BaseException) -> None:
        self._worker.drop(self._link)


class WorkerReceiver(Receiver):
    def __init__(self, port: Port, worker: Worker) -> None:
        self._worker = worker
        self._link = link_of(port)
        port.watch(worker.fd, worker.progress)
        port.note(worker.address)

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        self._worker.receive(Request(self._link, accept().numpy().data, done))

    def abort(self, cause: BaseException) -> None:
        self._worker.drop(self._link)


class SharedWorker(Transport):
    """CPU tensors between processes of one server, in datagrams."""

    name = "shared-worker"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities = Capabilities(frozenset({"cpu"}), auto_rank=5, same_server=True, in_flight=4)

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._worker: Worker | None = None
        self._lock = threading.Lock()  # links of several peers open at once

    @classmethod
    def probe(cls, options: Any) -> Verdict:
        return Verdict(True)

    def worker(self) -> Worker:
        with self._lock:
            self._worker = self._worker or Worker()
            return self._worker

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        return WorkerSender(port, self.worker())

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        return WorkerReceiver(port, self.worker())

    def close(self, deadline: Deadline) -> None:
        if self._worker is not None:
            self._worker.close()
