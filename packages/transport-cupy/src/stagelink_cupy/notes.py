"""Notes about slots: from the sender that one is filled, from the receiver that it is free."""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["Piece", "returned"]

_PIECE = struct.Struct("<IQ")
_NUMBER = struct.Struct("<I")


class Piece(NamedTuple):
    """A slot that the sender has filled.

    Attributes:
        slot: its number.
        size_bytes: how much of it is filled.
    """

    slot: int
    size_bytes: int

    def pack(self) -> bytes:
        """Encode it as a note."""
        return _PIECE.pack(*self)

    @classmethod
    def unpack(cls, note: bytes) -> Piece:
        """The other way.

        Raises:
            ValueError: it is no such note.
        """
        if len(note) != _PIECE.size:
            raise ValueError(f"a note of {len(note)} bytes, not {_PIECE.size}")
        return cls(*_PIECE.unpack(note))


def returned(slot: int) -> bytes:
    """A note that says that a slot is free, for `stagelink.transport.slots.returned_slots`."""
    return _NUMBER.pack(slot)
