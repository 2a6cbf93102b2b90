"""A message between its tensor and the slots, piece by piece; the same on both ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from stagelink.transport.blocking import synchronize

if TYPE_CHECKING:
    import torch

    from stagelink.transport.contract import Port
    from stagelink.transport.streams import StreamEvent
    from stagelink_cupy.notes import Piece
    from stagelink_cupy.region import Region

__all__ = ["End", "Passing"]

_AHEAD = 2
"""Copies that are queued at most before the twin is told of the oldest."""


class End(ABC):
    """One end of a link, as the pieces of a message see it.

    Attributes:
        port: of the link.
        region: of the link.
    """

    port: Port
    region: Region

    @abstractmethod
    def next(self, left_bytes: int) -> Piece | None:
        """The next piece of a message of which so much is left; None: there is none yet."""

    @abstractmethod
    def queue(self, piece: Piece, address: int) -> None:
        """Queue its copy, between its slot and this address."""

    @abstractmethod
    def tell(self, piece: Piece) -> None:
        """Tell the twin that this end is done with its slot."""

    @abstractmethod
    def wait(self) -> None:
        """Block until `next` may have one.

        Raises:
            StagelinkError: the handler failed or was closed.
        """


class Passing:
    """One message in flight.

    Args:
        end: of the link.
        payload: where the message is, or is to be; it is kept.
    """

    def __init__(self, end: End, payload: torch.Tensor) -> None:
        self._end = end
        self._payload = payload
        self._address = payload.data_ptr()
        self._left_bytes = payload.numel()
        self._queued: deque[tuple[Piece, StreamEvent | None]] = deque()

    def go_on(self) -> bool:
        """Queue the copy of the next piece, if there is one; never waits."""
        piece = self._end.next(self._left_bytes) if self._left_bytes else None
        if piece is None:
            return False
        self._end.queue(piece, self._address)
        self._queued.append((piece, self._end.port.stream.record()))
        self._address += piece.size_bytes
        self._left_bytes -= piece.size_bytes
        return True

    def finish(self) -> None:
        """Pass all of it; it has been copied when this returns. For `Finisher.submit`.

        Also where the device orders the copies: so no stream of the caller's ever waits for
        another process, which may die.
        """
        self._end.region.use()
        moment: StreamEvent | None = None
        while self._queued or self._left_bytes:
            while len(self._queued) < _AHEAD and self.go_on():
                pass
            if not self._queued:
                self._end.wait()
                continue
            piece, moment = self._queued.popleft()
            if not self._end.region.device_ordered:
                synchronize(moment, self._end.port)
            self._end.tell(piece)
        synchronize(moment, self._end.port)
