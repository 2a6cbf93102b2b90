"""What the sender says of a slot: with a message's header, or of a piece in a note of its own."""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["Filled"]

_FORMAT = struct.Struct("<I?xxxQ")


class Filled(NamedTuple):
    """A slot that the sender has filled. Where it is new, its descriptor comes along.

    Attributes:
        number: the slot's.
        keep: whether the receiver may hold on to it; else it copies it out at once.
        size_bytes: how much of it is filled.
    """

    number: int
    keep: bool
    size_bytes: int

    def pack(self) -> bytes:
        """As it travels."""
        return _FORMAT.pack(*self)

    @classmethod
    def unpack(cls, note: bytes) -> Filled:
        """The other way.

        Raises:
            ValueError: it is no such note.
        """
        if len(note) != _FORMAT.size:
            raise ValueError(f"a note of {len(note)} bytes, not {_FORMAT.size}")
        return cls(*_FORMAT.unpack(note))
