"""A transport for stagelink within a server: a pair of connected sockets for each link.

No thread of its own: core's reader watches the sockets, and calls when one can go on.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import torch

from stagelink.transport.contract import (
    Announce,
    Capabilities,
    Deadline,
    Done,
    Link,
    Message,
    Port,
    Receiver,
    Sender,
    Transport,
    Verdict,
)
from stagelink.transport.header import Header
from stagelink.transport.hooks import hookimpl

_SHARE_BYTES = 1024 * 1024  # moved at a time: everybody's messages wait for the reading thread


class SocketPair(Transport):
    """CPU tensors between processes or threads of one server."""

    name = "socketpair"
    api_version = (2, 0)
    capabilities = Capabilities(devices=frozenset({"cpu"}), auto_rank=1, same_server=True)

    @classmethod
    def probe(cls, options: object) -> Verdict:
        """Usable where a descriptor can be handed over."""
        if hasattr(socket, "SCM_RIGHTS"):
            return Verdict(True)
        return Verdict(False, "this system hands no descriptors over")

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Make the pair, and hand one of the two over."""
        return PairSender(port)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Needs no peer yet: its socket comes with a note."""
        return PairReceiver(port)


class Flow:
    """One direction of a connection: moves one buffer after the other, without ever waiting."""

    def __init__(self, port: Port, connection: socket.socket, *, sends: bool) -> None:
        connection.setblocking(False)
        self.close = connection.close
        self._move: Callable[[memoryview], int] = (
            connection.send if sends else connection.recv_into
        )
        self._port, self._fd, self._sends = port, connection.fileno(), sends

    def start(self, buffer: memoryview, done: Done) -> None:
        """Move what goes at once, and the rest whenever the socket is ready."""
        self._left, self._done = buffer, done
        if self._has_more():
            self._port.watch(self._fd, self._ready, writable=self._sends)

    def _ready(self) -> bool:
        self._has_more()
        return False  # the socket says when to call again

    def _has_more(self) -> bool:
        """Move a share; whether more is to come."""
        error: OSError | None = None
        try:
            if self._left:
                self._left = self._left[self._move(self._left[:_SHARE_BYTES]) or _broken() :]
        except BlockingIOError:
            pass
        except OSError as broken:
            error = broken
        if self._left and error is None:
            return True
        self._port.unwatch(self._fd)
        if error is None:
            self._done()  # the next message may start in this call
        else:
            self._done.failed(error)
        return False


def _broken() -> int:
    raise ConnectionError("the other end has closed the connection")


class PairSender(Sender):
    """The sending end: a message is done when the system has taken all of it."""

    def __init__(self, port: Port) -> None:
        mine, theirs = socket.socketpair()
        with theirs:  # a note's descriptors are duplicated at once
            port.note(b"", [theirs.fileno()])
        self._flow = Flow(port, mine, sends=True)

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """Send what goes at once, and have the rest sent."""
        announce()
        self._flow.start(message.payload.numpy().data, done)
        return True

    def close(self, deadline: Deadline) -> None:
        """Close the socket; what the system has taken still gets there."""
        self._flow.close()


class PairReceiver(Receiver):
    """The receiving end."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._flow: Flow | None = None

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """Take the socket that the sender hands over, before it announces anything."""
        self._flow = Flow(self._port, socket.socket(fileno=fds[0]), sends=False)

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """Receive what is there, and have the rest received."""
        if self._flow is None:
            raise ConnectionError("no socket came with a note of the sender's")
        self._flow.start(accept().numpy().data, done)

    def close(self, deadline: Deadline) -> None:
        """Close the socket."""
        if self._flow is not None:
            self._flow.close()


@hookimpl
def stagelink_register_transport() -> type[Transport]:
    """The one transport of this package."""
    return SocketPair
