"""Two ends of a link in one thread: sockets that are connected, and a reader to turn by hand."""

from __future__ import annotations

import select
import socket
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from stagelink_tcp.flow import Flow

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from stagelink.transport.contract import Port


SOON_S = 20.0


class Reader:
    """What a flow asks of its port: to watch a descriptor, and to leave off.

    Attributes:
        watched: the actions, by descriptor.
    """

    def __init__(self) -> None:
        self.watched: dict[int, tuple[Callable[[], bool], bool]] = {}

    def watch(self, fd: int, action: Callable[[], bool], *, writable: bool = False) -> None:
        assert fd not in self.watched
        self.watched[fd] = action, writable

    def unwatch(self, fd: int) -> None:
        del self.watched[fd]

    def turn(self, patience_s: float = 0.0) -> bool:
        """Call the action of every descriptor that is ready; whether there was one in time."""
        writable = [fd for fd, (_, writes) in self.watched.items() if writes]
        found = select.select(list(self.watched), writable, [], patience_s)
        ready = {*found[0], *found[1]}
        for fd in ready:
            if fd in self.watched:  # else one before it has had it unwatched
                assert self.watched[fd][0]() is False
        return bool(ready)


def connected(buffer_bytes: int = 1 << 16) -> tuple[socket.socket, socket.socket]:
    """Two TCP sockets of this host, which hold little of what is on its way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        near.connect(listener.getsockname())
        return near, listener.accept()[0]


class Streams:
    """A link's streams: so many sockets, with a flow at each end.

    Attributes:
        reader: of both ends.
        sending, receiving: the flows, in their order.
    """

    def __init__(self, count: int = 1) -> None:
        self.reader = Reader()
        pairs = [connected() for _ in range(count)]
        make: Any = partial(Flow, cast("Port", self.reader))
        self.sending = [make(near, sends=True) for near, _ in pairs]
        self.receiving = [make(far, sends=False) for _, far in pairs]

    def settle(self, done: Callable[[], bool]) -> None:
        """Turn until something is done."""
        while not done():
            assert self.reader.turn(SOON_S), "nobody is ready"

    def close(self) -> None:
        """Close both ends."""
        for flow in (*self.sending, *self.receiving):
            flow.close()


def pattern(size_bytes: int, seed: int = 0) -> torch.Tensor:
    """A payload of its own for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)
