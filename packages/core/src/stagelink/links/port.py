"""Port of a link's end, as core makes it."""

# ruff: noqa: D102 - the calls are the contract's

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.distributed import Store

from stagelink.control.plane import Plane
from stagelink.control.rendezvous import Rendezvous
from stagelink.deadline import Deadline
from stagelink.errors import PeerClosedError, TransportError
from stagelink.links.link_end import LinkEnd
from stagelink.links.out_link import OutLink
from stagelink.transport.buffers import BufferPool
from stagelink.transport.contract import Link
from stagelink.transport.header import MAX_NOTE_BYTES, Header, MessageKind
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.streams import Stream


def other_end(link: Link, rank: int) -> int:
    """The rank at the end that is not this rank's."""
    return link.target if link.source == rank else link.source


class Services(NamedTuple):
    """Parts of a rank that its links' ports lead to."""

    plane: Plane
    rendezvous: Rendezvous
    pool: BufferPool
    window_of: Callable[[Link], int]


def post_for(
    plane: Plane, link: Link, peer: int, header: Header, note: bytes, fds: Sequence[int]
) -> None:
    """Send a frame with what a transport has to say; returns at once.

    `TransportError` where the note is none, or too long, or the descriptors cannot be sent.
    """
    if not isinstance(note, bytes):
        raise TransportError(f"{link}: a note is bytes, not {type(note).__name__}")
    if len(note) > MAX_NOTE_BYTES:
        raise TransportError(
            f"{link}: a note of {len(note)} bytes to rank {peer}; it takes {MAX_NOTE_BYTES}"
        )
    try:
        plane.post(peer, header, note, fds=fds)
    except (OSError, TypeError, ValueError, OverflowError) as error:
        if stops_caller(error):
            raise
        raise TransportError(
            f"{link}: descriptors {fds!r} to rank {peer}: {type(error).__name__}: {error}"
        ) from error


class LinkPort:
    """Port of one end of a link; ``number`` is what the link is called in the two ranks' notes."""

    def __init__(self, core: Services, link: Link, end: LinkEnd[Any], number: int) -> None:
        self.link = link
        self._core = core
        self._end = end
        self._number = number

    @property
    def rank(self) -> int:
        return self._core.plane.rank

    @property
    def peer(self) -> int:
        return other_end(self.link, self.rank)

    @property
    def address(self) -> str:
        return self._core.plane.address_with(self.peer)

    @property
    def window(self) -> int:
        return self._core.window_of(self.link)

    @property
    def stream(self) -> Stream:
        return self._end.stream

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        header = Header(MessageKind.NOTE, link=self._number)
        post_for(self._core.plane, self.link, self.peer, header, note, fds)

    def room(self) -> None:
        if isinstance(self._end, OutLink):
            self._end.room()

    def fail(self, error: BaseException) -> None:
        if stops_caller(error):  # which is no failure of the transport's
            raise error
        failure = TransportError(f"{self.link}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        with suppress(PeerClosedError):  # then it is none
            self._core.plane.failure.blame(failure, self.peer)

    def wait(self, ready: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        if self._end.begins_here:
            raise TransportError(
                f"{self.link}: port.wait in a begin, which must not wait; return False, and call "
                "port.room() when there is room"
            )
        if self._core.plane.reader.reads_here:  # nobody else reads what it would wait for
            raise TransportError(
                f"{self.link}: port.wait on the thread that reads, which must not wait: in an "
                "on_note or an action"
            )

        def look() -> bool:
            if ready():
                return True
            self._end.check_open()
            return self._core.plane.goodbyes.check_reached(self.peer, f"an answer on {self.link}")

        return self._core.plane.wait(look, deadline or Deadline(math.inf), closing=True)

    def watch(self, fd: int, action: Callable[[], bool], *, writable: bool = False) -> None:
        self._end.watch(self._core.plane.reader, fd, action, writable=writable)

    def unwatch(self, fd: int) -> None:
        self._end.unwatch(fd)

    def pause(self, seconds: float) -> None:
        # Not by reading, which counts whole milliseconds.
        self._end.check_open()
        self._core.plane.failure.check_failure()
        time.sleep(seconds)

    def wake(self) -> None:
        self._core.plane.changed()

    def call(self, action: Callable[[], None]) -> None:
        self._core.plane.reader.call(action)

    def store(self) -> Store:
        low, high = sorted((self.link.source, self.link.target))
        return self._core.rendezvous.pair_store(f"{low}-{high}/{self.link.transport}")

    def buffer(self, size_bytes: int) -> torch.Tensor:
        return self._core.pool.take(size_bytes)
