"""A message between its tensor and the slots, piece by piece; the same on both ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from stagelink.transport.contract import Pending
from stagelink.transport.lanes import reach

if TYPE_CHECKING:
    import torch

    from stagelink.transport.contract import Deadline, Port
    from stagelink.transport.lanes import Moment
    from stagelink_cupy.notes import Piece
    from stagelink_cupy.region import Region

__all__ = ["Passing", "Way"]

_AHEAD = 2
"""Copies that are queued at most before the twin is told of the oldest."""


class Way(ABC):
    """Where the pieces of one end go.

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
    def wait(self, deadline: Deadline) -> None:
        """Block until `next` may have one.

        Raises:
            TimeoutError: the deadline passed.
            StagelinkError: the handler failed or was closed.
        """


class Passing(Pending):
    """One message under way.

    Args:
        way: of this end.
        payload: where the message is, or is to be; it is kept.
    """

    def __init__(self, way: Way, payload: torch.Tensor) -> None:
        self._way = way
        self._payload = payload
        self._address = payload.data_ptr()
        self._left_bytes = payload.numel()
        self._queued: deque[tuple[Piece, Moment | None]] = deque()

    def go_on(self) -> bool:
        """Queue the copy of the next piece, if there is one; never waits."""
        piece = self._way.next(self._left_bytes) if self._left_bytes else None
        if piece is None:
            return False
        self._way.queue(piece, self._address)
        self._queued.append((piece, self._way.port.lane.moment()))
        self._address += piece.size_bytes
        self._left_bytes -= piece.size_bytes
        return True

    def finish(self, deadline: Deadline) -> None:
        """Pass all of it; it has been copied when this returns.

        Also where the device orders the copies: so no stream of the caller's ever waits for
        another process, which may die.
        """
        self._way.region.use()
        moment: Moment | None = None
        while self._queued or self._left_bytes:
            while len(self._queued) < _AHEAD and self.go_on():
                pass
            if not self._queued:
                self._way.wait(deadline)
                continue
            piece, moment = self._queued.popleft()
            if not self._way.region.device_ordered:
                reach(moment, self._way.port, deadline)
            self._way.tell(piece)
        reach(moment, self._way.port, deadline)
