"""A transport that can only block: TCP sockets, each link with a connection and a `Finisher`.

What the planted faults are planted in; and itself a transport that passes all tests.
"""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from stagelink.transport.blocking import Finisher
from stagelink.transport.contract import API_VERSION, Capabilities, Transport, Verdict
from stagelink.transport.contract import Receiver as AnyReceiver
from stagelink.transport.contract import Sender as AnySender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.deadline import Deadline
    from stagelink.transport.contract import Announce, Done, Link, Message, Port
    from stagelink.transport.header import Header

__all__ = ["BlockingTcp", "Receiver", "Sender"]

HOST = "127.0.0.1"
TOKEN_BYTES = 16


class Sender(AnySender):
    """Connects when the receiver's note has come."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._finisher = Finisher(port)
        self._socket = socket.socket()
        self._peer = 0
        self._token = b""
        self._aborted = False

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """There is room as soon as the receiver's address is known."""
        if not self._peer:
            return False
        announce()
        self._finisher.submit(partial(self.send, message.payload), done)
        return True

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """Where the receiver listens, and the token that it wants to see."""
        self._token, self._peer = note[:TOKEN_BYTES], int(note[TOKEN_BYTES:])
        self._port.room()

    def send(self, payload: torch.Tensor) -> None:
        """Send bytes; the first time connect and show the token."""
        if self._token:
            self._socket.connect((HOST, self._peer))
            if self._aborted:
                shut_down(self._socket)
            self._socket.sendall(self._token)
            self._token = b""
        self._socket.sendall(payload.numpy().data)

    def abort(self, cause: BaseException) -> None:
        """Wake both ends."""
        self._aborted = True
        shut_down(self._socket)

    def close(self, deadline: Deadline) -> None:
        """Close the connection."""
        self._finisher.close(deadline)
        self._socket.close()


class Receiver(AnyReceiver):
    """Listens until the sender's end has connected."""

    def __init__(self, port: Port) -> None:
        self._finisher = Finisher(port)
        self._listener = socket.create_server((HOST, 0))
        self._socket = self._listener  # until the sender has connected
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._aborted = False
        port.note(self._token + str(self._listener.getsockname()[1]).encode())

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """Whatever there is to wait for is waited for on the finisher's thread."""
        buffer = accept()
        self._finisher.submit(partial(self.receive, buffer.numpy().data), done)

    def receive(self, view: memoryview) -> None:
        """Fill the view with the bytes that come next."""
        if self._socket is self._listener:
            self._socket = self._listener.accept()[0]
            if self._aborted:
                shut_down(self._socket)
            token = bytearray(TOKEN_BYTES)
            fill(self._socket, memoryview(token))
            assert token == self._token
        fill(self._socket, view)

    def abort(self, cause: BaseException) -> None:
        """Wake both ends; Linux wakes a thread in ``accept`` as well."""
        self._aborted = True
        shut_down(self._listener)
        shut_down(self._socket)

    def close(self, deadline: Deadline) -> None:
        """Close the connection."""
        self._finisher.close(deadline)
        self._listener.close()
        self._socket.close()


def fill(source: socket.socket, view: memoryview) -> None:
    """Receive until the view is full."""
    while view:
        count = source.recv_into(view)
        if count == 0:
            raise ConnectionError("the other end has closed the connection")
        view = view[count:]


def shut_down(connection: socket.socket) -> None:
    """End all waits on a socket."""
    with suppress(OSError):  # it was not connected, or the other end was first
        connection.shutdown(socket.SHUT_RDWR)


class BlockingTcp(Transport):
    """CPU tensors between processes and threads of one server."""

    name = "blocking-tcp"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities = Capabilities(frozenset({"cpu"}), auto_rank=5, same_server=True)
    sender: type[Sender] = Sender
    receiver: type[Receiver] = Receiver

    @classmethod
    def probe(cls, options: Any) -> Verdict:
        return Verdict(True)

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> AnySender:
        return self.sender(port)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> AnyReceiver:
        return self.receiver(port)
