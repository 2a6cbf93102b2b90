"""The receiving end: out of the slots that the sender has filled, and these home."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from stagelink.transport.blocking import Finisher
from stagelink.transport.contract import Receiver
from stagelink_cupy.notes import Piece, returned
from stagelink_cupy.passing import End, Passing
from stagelink_cupy.region import SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import Deadline, Done, Port
    from stagelink.transport.header import Header
    from stagelink_cupy.holding import Holding

__all__ = ["CupyReceiver"]


class CupyReceiver(Receiver, End):
    """The receiving end.

    Args:
        port: of the link.
        holding: the sender's memory, opened here.
    """

    def __init__(self, port: Port, holding: Holding) -> None:
        self.port = port
        self.region = holding.region
        self._holding = holding
        self._filled: deque[Piece] = deque()
        self._finisher = Finisher(port)

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """Only take the buffer: the pieces are for the finisher's thread."""
        del header, note, fds
        self._finisher.submit(Passing(self, accept()).finish, done)

    def next(self, left_bytes: int) -> Piece | None:
        """The oldest that has come.

        Raises:
            ValueError: it is not what the message needs.
        """
        if not self._filled:
            return None
        piece = self._filled.popleft()
        expected = min(left_bytes, self.region.slot_bytes)
        if piece.slot >= SLOTS or piece.size_bytes != expected:
            raise ValueError(
                f"slot {piece.slot} came with {piece.size_bytes} bytes; expected {expected} in "
                f"one of {SLOTS}"
            )
        return piece

    def queue(self, piece: Piece, address: int) -> None:
        """Out of the slot."""
        self.region.copy(piece.slot, address, self.region.address(piece.slot), piece.size_bytes)

    def tell(self, piece: Piece) -> None:
        """Tell that it is free."""
        self.port.note(returned(piece.slot))

    def wait(self) -> None:
        """Wait for the next one."""
        self.port.wait(lambda: bool(self._filled))

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """A slot is filled; or, before all others, the twin's call."""
        try:
            if fds:
                self._holding.answer(fds[0])
            else:
                self._filled.append(Piece.unpack(note))
        except (OSError, ValueError) as error:
            self.port.fail(error)
        else:
            self.port.wake()

    def close(self, deadline: Deadline) -> None:
        """Close the sender's memory, and tell it."""
        self._finisher.close(deadline)
        self._holding.close(deadline)
