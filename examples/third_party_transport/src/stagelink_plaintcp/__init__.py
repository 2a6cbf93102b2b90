"""A transport for stagelink by plain TCP sockets: one connection for each link."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from stagelink.transport.contract import (
    FINISHED,
    Announce,
    Capabilities,
    Deadline,
    Link,
    Message,
    Pending,
    Place,
    Port,
    Receiver,
    Sender,
    Transport,
    Verdict,
)
from stagelink.transport.hooks import hookimpl

if TYPE_CHECKING:
    import torch

    from stagelink.transport.header import Header

_TOKEN_BYTES = 16


@dataclass(frozen=True)
class PlainTcpOptions:
    """Options in ``[transports.plaintcp]``.

    Attributes:
        host: the address of this host that its peers can reach.
    """

    host: str = "127.0.0.1"


class PlainTcp(Transport):
    """CPU tensors between processes, on one server or on several."""

    name: ClassVar[str] = "plaintcp"
    api_version: ClassVar[tuple[int, int]] = (1, 0)
    capabilities: ClassVar[Capabilities] = Capabilities(frozenset({"cpu"}), auto_rank=5)
    Options: ClassVar[type[Any]] = PlainTcpOptions

    @classmethod
    def probe(cls, options: PlainTcpOptions) -> Verdict:
        """Usable where the host's address is one of this machine's."""
        try:
            socket.create_server((options.host, 0)).close()
        except OSError as error:
            return Verdict(False, f"cannot listen on {options.host!r}: {error}")
        return Verdict(True)

    def describe(self) -> Mapping[str, Any]:
        """What a peer must know to judge a link."""
        return {"host": self.options.host}

    def can_connect(self, link: Link, local: Place, remote: Place) -> Verdict:
        """Not between servers where one of them listens on loopback only."""
        hosts = [str(place.description.get("host")) for place in (local, remote)]
        if local.server != remote.server and any(host.startswith("127.") for host in hosts):
            return Verdict(False, "`host` must be an address that other servers reach")
        return Verdict(True)

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Needs no peer yet: its address comes in a note."""
        return TcpSender(port)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Listen, and tell the sender where."""
        return TcpReceiver(port, self.options.host)


class TcpSender(Sender):
    """Connects when the receiver's note has come."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._socket = socket.socket()
        self._peer: tuple[str, int, bytes] | None = None
        self._connected = False
        self._aborted = False

    def begin(self, message: Message, announce: Announce) -> Pending | None:
        """There is room as soon as the receiver's address is known."""
        if self._peer is None:
            return None
        announce()
        return _Sending(self, message.payload) if message.header.payload_bytes else FINISHED

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """Where the receiver listens, and the token that it wants to see."""
        port, host = note[_TOKEN_BYTES:].decode().split(" ")
        self._peer = (host, int(port), note[:_TOKEN_BYTES])
        self._port.room()

    def send(self, payload: torch.Tensor, deadline: Deadline) -> None:
        """Send bytes; the first time connect and show the token."""
        if self._peer is not None and not self._connected:
            host, port, token = self._peer
            self._socket.settimeout(_seconds(deadline))
            self._socket.connect((host, port))
            self._connected = True
            self._socket.sendall(token)
        if self._aborted:
            raise ConnectionAbortedError("given up")
        self._socket.settimeout(_seconds(deadline))
        self._socket.sendall(payload.numpy().data)

    def abort(self, cause: BaseException) -> None:
        """Wake both ends."""
        self._aborted = True
        _shut_down(self._socket)

    def close(self, deadline: Deadline) -> None:
        """Close the connection."""
        self._socket.close()


@dataclass
class _Sending(Pending):
    sender: TcpSender
    payload: torch.Tensor

    def finish(self, deadline: Deadline) -> None:
        self.sender.send(self.payload, deadline)


class TcpReceiver(Receiver):
    """Listens until the sender's end has connected."""

    def __init__(self, port: Port, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self._socket = self._listener  # until the sender has connected
        self._welcomed = False
        self._aborted = False
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        port.note(self._token + f"{self._listener.getsockname()[1]} {host}".encode())

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
    ) -> Pending:
        """Whatever there is to wait for is waited for in `finish`."""
        return _Receiving(self, accept())

    def receive(self, view: memoryview, deadline: Deadline) -> None:
        """Fill the view with the bytes that come next."""
        while not self._welcomed:
            self._listener.settimeout(_seconds(deadline))
            self._socket = self._listener.accept()[0]
            self._welcomed = self._knows_token(self._socket, deadline)
        _fill(self._socket, view, deadline)

    def _knows_token(self, stranger: socket.socket, deadline: Deadline) -> bool:
        token = bytearray(_TOKEN_BYTES)
        with suppress(ConnectionError):
            _fill(stranger, memoryview(token), deadline)
        if self._aborted:
            raise ConnectionAbortedError("given up")
        if secrets.compare_digest(token, self._token):
            return True
        stranger.close()
        return False

    def abort(self, cause: BaseException) -> None:
        """Wake both ends; Linux wakes who waits in ``accept`` as well."""
        self._aborted = True
        _shut_down(self._listener)
        _shut_down(self._socket)

    def close(self, deadline: Deadline) -> None:
        """Close the connection."""
        self._listener.close()
        self._socket.close()


@dataclass
class _Receiving(Pending):
    receiver: TcpReceiver
    buffer: torch.Tensor

    def finish(self, deadline: Deadline) -> None:
        if self.buffer.numel():
            self.receiver.receive(self.buffer.numpy().data, deadline)


def _fill(source: socket.socket, view: memoryview, deadline: Deadline) -> None:
    while view:
        source.settimeout(_seconds(deadline))
        count = source.recv_into(view)
        if count == 0:
            raise ConnectionError("the other end has closed the connection")
        view = view[count:]


def _seconds(deadline: Deadline) -> float:
    # 0 would mean not to wait at all, and the system counts milliseconds in 32 bits.
    return min(max(deadline.remaining_s, 0.001), 86400.0)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # it was not connected, or the other end was first
        connection.shutdown(socket.SHUT_RDWR)


@hookimpl
def stagelink_register_transport() -> type[Transport]:
    """The one transport of this package."""
    return PlainTcp
