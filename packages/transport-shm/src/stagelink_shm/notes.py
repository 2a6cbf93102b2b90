"""Notes about slots by the sender: with a message's header, or of a piece in a note of its own."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

__all__ = ["BOARD", "SHORT", "Filled", "given_up", "pack_filled", "pack_given_up"]

_FORMAT = struct.Struct("<I?3xQ")
_NUMBER = struct.Struct("<I")
_GIVEN_UP = b"x"

BOARD = b"="
"""With the descriptor of a `SlotBoard`, before the first slot."""

SHORT = b"?"
"""The sender has no slot: it is to be told when one has been returned."""


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

    @classmethod
    def unpack(cls, note: bytes) -> Filled:
        """The other way.

        Raises:
            ValueError: it is no such note.
        """
        if len(note) != _FORMAT.size:
            raise ValueError(f"a note of {len(note)} bytes, not {_FORMAT.size}")
        return tuple.__new__(cls, _FORMAT.unpack(note))


pack_filled: Callable[[int, bool, int], bytes] = _FORMAT.pack
"""A note of a `Filled`, of its fields."""


def pack_given_up(numbers: Iterable[int]) -> bytes:
    """A note that says which slots are no more."""
    return _GIVEN_UP + b"".join(map(_NUMBER.pack, numbers))


def given_up(note: bytes) -> Iterator[int] | None:
    """The slots that a note of `pack_given_up` names; None where it is no such note."""
    if note[:1] != _GIVEN_UP or len(note) % _NUMBER.size != 1:
        return None
    return (number for (number,) in _NUMBER.iter_unpack(note[1:]))
