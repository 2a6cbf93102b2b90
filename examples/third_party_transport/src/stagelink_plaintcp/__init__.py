"""A transport for stagelink by plain TCP sockets: one connection for each link.

No thread of its own: core's reader watches the sockets, and calls when one can go on.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from stagelink.transport.contract import (
    Announce,
    Capabilities,
    Deadline,
    Done,
    Endpoint,
    Link,
    Message,
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
_SHARE_BYTES = 1024 * 1024
"""Moved at a time: everybody's messages wait for the reading thread."""


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
    api_version: ClassVar[tuple[int, int]] = (2, 0)
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
        """The host, for a peer to judge a link by."""
        return {"host": self.options.host}

    def can_connect(self, link: Link, local: Endpoint, remote: Endpoint) -> Verdict:
        """Refuse two servers where one of them listens on loopback only."""
        hosts = [str(place.description.get("host")) for place in (local, remote)]
        if local.server != remote.server and any(host.startswith("127.") for host in hosts):
            return Verdict(False, "`host` must be an address that other servers reach")
        return Verdict(True)

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Listen, and tell the receiver where."""
        return TcpSender(port, self.options.host)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Needs no peer yet: its address comes in a note."""
        return TcpReceiver(port)


class Flow:
    """One direction of a connection: moves one buffer after the other, without ever waiting.

    Args:
        port: of the link.
        connection: the socket.
        sends: whether it sends.
    """

    def __init__(self, port: Port, connection: socket.socket, *, sends: bool) -> None:
        connection.setblocking(False)
        self._move = connection.send if sends else connection.recv_into
        self._watch = partial(port.watch, connection.fileno(), self._ready, writable=sends)
        self._unwatch = partial(port.unwatch, connection.fileno())

    def start(
        self,
        buffer: memoryview,
        then: Callable[[], object],
        failed: Callable[[Exception], object],
    ) -> None:
        """Move the buffer: what goes at once here, and the rest whenever the socket is ready.

        Then, or when it has failed, one of the two is called, and the next buffer may come.
        """
        self._left, self._then, self._failed = buffer, then, failed
        if self._has_more():
            self._watch()

    def _ready(self) -> bool:
        self._has_more()
        return False  # the socket says when to call again

    def _has_more(self) -> bool:
        """Move a share; whether more is to come."""
        try:
            self._left = self._left[self._moved_bytes() :]
        except OSError as error:
            self._unwatch()
            self._failed(error)
            return False
        if self._left:
            return True
        self._unwatch()
        self._then()
        return False

    def _moved_bytes(self) -> int:
        if not self._left:
            return 0
        try:
            count = self._move(self._left[:_SHARE_BYTES])
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionError("the other end has closed the connection")
        return count


class TcpSender(Sender):
    """Listens until the receiver's end has connected."""

    def __init__(self, port: Port, host: str) -> None:
        self._port = port
        self._flow: Flow | None = None
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self._sockets = [self._listener]
        port.watch(self._listener.fileno(), self._welcome)
        port.note(self._token + "{} {}".format(*self._listener.getsockname()).encode())

    def _welcome(self) -> bool:
        try:
            stranger = self._listener.accept()[0]
        except BlockingIOError:
            return False
        self._sockets.append(stranger)
        token = bytearray(_TOKEN_BYTES)
        judge = partial(self._judge, stranger, token)
        flow = Flow(self._port, stranger, sends=False)
        flow.start(memoryview(token), judge, lambda _: stranger.close())
        return False

    def _judge(self, stranger: socket.socket, token: bytearray) -> None:
        if secrets.compare_digest(token, self._token):
            self._port.unwatch(self._listener.fileno())
            self._flow = Flow(self._port, stranger, sends=True)
            self._port.room()
        else:
            stranger.close()

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """Send, if the receiver has connected."""
        if self._flow is None:
            return False
        announce()
        self._flow.start(message.payload.numpy().data, done, done.failed)
        return True

    def close(self, deadline: Deadline) -> None:
        """Close the connection."""
        for each in self._sockets:
            each.close()


class TcpReceiver(Receiver):
    """Connects when the sender's note has come."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._socket = socket.socket()
        self._flow = Flow(port, self._socket, sends=False)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """Connect: the sender says where it listens, and which token it wants to see."""
        host, port = note[_TOKEN_BYTES:].decode().split(" ")
        self._socket.connect_ex((host, int(port)))  # what goes wrong comes out of the first send
        token = memoryview(note)[:_TOKEN_BYTES]
        Flow(self._port, self._socket, sends=True).start(token, lambda: None, self._port.fail)

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """The sender has seen the token: the connection is there."""
        self._flow.start(accept().numpy().data, done, done.failed)

    def close(self, deadline: Deadline) -> None:
        """Close the connection."""
        self._socket.close()


@hookimpl
def stagelink_register_transport() -> type[Transport]:
    """The one transport of this package."""
    return PlainTcp
