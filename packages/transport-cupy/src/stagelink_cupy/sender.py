"""The sending end: the payload into slots, as they are returned."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

from stagelink.transport.blocking import Finisher
from stagelink.transport.contract import Sender
from stagelink.transport.slots import SlotRing, returned_slots
from stagelink_cupy.notes import Piece
from stagelink_cupy.passing import End, Passing
from stagelink_cupy.region import SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagelink.transport.contract import Announce, Deadline, Done, Message, Port
    from stagelink_cupy.holding import Holding

__all__ = ["CupySender"]


class CupySender(Sender, End):
    """The sending end.

    Args:
        port: of the link.
        holding: its memory, which the receiver has open.
    """

    def __init__(self, port: Port, holding: Holding) -> None:
        self.port = port
        self.region = holding.region
        self._holding = holding
        self._lock = threading.Lock()
        self._short = False
        self._finisher = Finisher(port)
        numbers = itertools.count()
        self._ring = SlotRing(
            lambda _: next(numbers),
            most=SLOTS,
            bound_bytes=self.region.size_bytes,
            granule_bytes=self.region.slot_bytes,  # so that all are alike and none is given up
        )

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """Have the receiver get ready, and queue the first piece if there is a slot for it."""
        announce()
        passing = Passing(self, message.payload)
        passing.go_on()
        self._finisher.submit(passing.finish, done)
        return True

    def next(self, left_bytes: int) -> Piece | None:
        """Take a slot for as much as it holds, if one is free."""
        with self._lock:
            slot = self._ring.take(min(left_bytes, self.region.slot_bytes))
            if slot is None:
                self._short = True
                return None
        return Piece(slot.memory, min(left_bytes, self.region.slot_bytes))

    def queue(self, piece: Piece, address: int) -> None:
        """Into the slot."""
        self.region.copy(piece.slot, self.region.address(piece.slot), address, piece.size_bytes)

    def tell(self, piece: Piece) -> None:
        """Tell that it is filled."""
        self.port.note(piece.pack())

    def wait(self) -> None:
        """Wait for a slot to be returned."""
        self.port.wait(lambda: not self._short)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """Take back what was returned."""
        del fds
        try:
            with self._lock:
                for number, _ in returned_slots(note):
                    self._ring.give_back(number)
                self._short = False
        except ValueError as error:
            self.port.fail(error)
        else:
            self.port.wake()

    def close(self, deadline: Deadline) -> None:
        """Close what is the receiver's; the memory is given back when it has closed that."""
        self._finisher.close(deadline)
        self._holding.close(deadline)
