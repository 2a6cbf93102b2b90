"""Slots: pieces of memory that both ends of a link see, each for one message at a time.

The sender owns them, whatever memory they are made of: it makes a slot when it needs one, fills
it, and tells the receiver its number. The receiver reads it and returns the number, at once or
when the last tensor that is a view of the slot has died. Until then the slot is *out*, else
*free*.

Few slots that are used again and again stay in the processor's cache, so the one that was returned
last is the next to be used, and none is made before all that fit are out.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

import torch

from stagelink.transport.buffers import lease
from stagelink.transport.contract import Port

_M = TypeVar("_M")

_LARGEST_SHARE = 8
"""A slot takes at most this part of the bound: then two are free, whatever is kept."""

_RESERVE = 2
_MOST = 1024
"""Slots of one link, whatever its window: each is a mapping, of which Linux allows a process 65530
in all, and at its bound of 1 GiB a link then still lends views of 1 MiB each."""

_WASTE = 4
"""A slot this many times too large is only used where no other can be made."""

_WORD = struct.Struct("<I")
_UNUSABLE = 1 << 31

_all: dict[int, weakref.ref[SlotReturns]] = {}


class Slot(Generic[_M]):
    """One slot.

    Args:
        number: what the two ends call it; used again when the slot is given up.
        capacity_bytes: the most it holds.
        memory: what it is made of.

    Attributes:
        kept: whether the receiver may hold on to it for as long as it likes.
    """

    __slots__ = ("capacity_bytes", "kept", "memory", "number")

    def __init__(self, number: int, capacity_bytes: int, memory: _M) -> None:
        self.number = number
        self.capacity_bytes = capacity_bytes
        self.memory = memory
        self.kept = False


class SlotRing(Generic[_M]):
    """The sender's slots, free and out. Not thread-safe.

    Args:
        make: makes memory of a number of bytes, a multiple of ``granule_bytes``.
        most: limit of slots; raised to 4 where it is less, and lowered to 1024 where it is more.
        bound_bytes: how much memory all of them may take.
        granule_bytes: a power of two.
    """

    def __init__(
        self, make: Callable[[int], _M], *, most: int, bound_bytes: int, granule_bytes: int = 4096
    ) -> None:
        self.most = min(max(most, 2 * _RESERVE), _MOST)
        self.largest_bytes = bound_bytes // _LARGEST_SHARE // granule_bytes * granule_bytes
        self._make = make
        self._bound_bytes = bound_bytes
        self._granule_bytes = granule_bytes
        self._bytes = 0
        self._kept_bytes = 0
        self._kept = 0
        self._free: list[Slot[_M]] = []  # what was returned last is at the end
        self._out: dict[int, Slot[_M]] = {}
        self._numbers: list[int] = []
        self._given_up: list[int] = []

    def take(self, size_bytes: int) -> Slot[_M] | None:
        """Take a slot for a message of up to ``largest_bytes``; None until one is returned.

        Where the bound leaves no memory for a slot of the wanted size, free slots that are too
        small are given up, those first that have been free longest.
        """
        capacity = self.capacity_for(size_bytes)
        found = self._best_free(size_bytes)
        if found is None or found.capacity_bytes > _WASTE * capacity:
            found = self._new(capacity) or found
        if found is None and not self._enough_if_given_up(capacity):
            return None
        while found is None and self._free:
            self._give_up(self._free.pop(0))
            found = self._new(capacity)
        if found is None:
            return None
        if found in self._free:
            self._free.remove(found)
        self._out[found.number] = found
        return found

    def given_up(self) -> list[int]:
        """Numbers of slots that were given up since the last call, for the receiver.

        It has them mapped until it is told, so it is told before it hears of a new slot.
        """
        numbers, self._given_up = self._given_up, []
        return numbers

    def grow(self, most: int) -> None:
        """Raise the limit of slots to ``most``; never lowers it."""
        self.most = min(max(self.most, most), _MOST)

    def may_keep(self, slot: Slot[_M]) -> bool:
        """Whether the receiver may keep a slot that was taken; else it must copy it out.

        However much it keeps, a message of any size finds two slots that it does not.
        """
        size = slot.capacity_bytes
        slot.kept = (
            self._kept + 1 <= self.most - _RESERVE
            and self._kept_bytes + size <= self._bound_bytes - _RESERVE * self.largest_bytes
        )
        if slot.kept:
            self._kept += 1
            self._kept_bytes += size
        return slot.kept

    def give_back(self, number: int, *, usable: bool = True) -> None:
        """Free a slot that the receiver has returned.

        Args:
            number: the slot's.
            usable: whether it may be used again.

        Raises:
            ValueError: it was not out.
        """
        slot = self._out.pop(number, None)
        if slot is None:
            raise ValueError(f"slot {number} was returned and was not out")
        if slot.kept:
            slot.kept = False
            self._kept -= 1
            self._kept_bytes -= slot.capacity_bytes
        if usable:
            self._free.append(slot)
        else:
            self._give_up(slot)

    def clear(self) -> None:
        """Let go of all slots, also of those that are out."""
        self._free.clear()
        self._out.clear()
        self._bytes = self._kept = self._kept_bytes = 0

    def capacity_for(self, size_bytes: int) -> int:
        """Bytes of a slot made for a message of this size; sizes nearly alike have the same."""
        step = max(self._granule_bytes, 1 << max(0, (size_bytes - 1).bit_length() - 3))
        return min(-(-size_bytes // step) * step, max(self.largest_bytes, self._granule_bytes))

    def most_bytes(self, size_bytes: int) -> int:
        """Memory of all slots if they are made for messages of this size."""
        return min(self.most * self.capacity_for(size_bytes), self._bound_bytes)

    @property
    def count(self) -> int:
        """Number of slots, out and free."""
        return len(self._out) + len(self._free)

    def _enough_if_given_up(self, capacity: int) -> bool:
        free = sum(slot.capacity_bytes for slot in self._free)
        fits = self._bytes - free + capacity <= self._bound_bytes
        return bool(self._free) and fits and len(self._out) < self.most

    def _best_free(self, size_bytes: int) -> Slot[_M] | None:
        best: Slot[_M] | None = None
        for slot in self._free:
            fits = slot.capacity_bytes >= size_bytes
            if fits and (best is None or slot.capacity_bytes <= best.capacity_bytes):
                best = slot
        return best

    def _new(self, capacity: int) -> Slot[_M] | None:
        if self.count >= self.most or self._bytes + capacity > self._bound_bytes:
            return None
        memory = self._make(capacity)
        number = self._numbers.pop() if self._numbers else self.count
        self._bytes += capacity
        return Slot(number, capacity, memory)

    def _give_up(self, slot: Slot[_M]) -> None:
        self._bytes -= slot.capacity_bytes
        self._numbers.append(slot.number)
        self._given_up.append(slot.number)


class SlotReturns:
    """The receiving end of a `SlotRing`: lends slots and returns them.

    What is on loan when the process forks is not used again: a data-loader worker that holds a
    received tensor would see it rewritten. The memory is shared with it all the same: what parent
    or child write into the tensor, both see.

    Args:
        port: the link's; the sender's ``on_note`` gets notes for `returned_slots`.
    """

    def __init__(self, port: Port) -> None:
        self._port: Port | None = port
        self._lent: set[int] = set()
        self._forked: set[int] = set()
        self._back: deque[int] = deque()
        self._called = False
        number = id(self)
        _all[number] = weakref.ref(self, lambda _: _all.pop(number, None))

    def lend(self, number: int, memory: torch.Tensor, size_bytes: int) -> torch.Tensor:
        """Lend a slot's message as a tensor; the slot is returned when its last view has died.

        Raises:
            ValueError: the slot is on loan already.
        """
        if number in self._lent:
            raise ValueError(f"slot {number} came again before it was returned")
        self._lent.add(number)
        return lease(memory, size_bytes, partial(self._on_return, number))

    def release(self, number: int) -> None:
        """Return a slot that was read to its sender.

        Its sender hears of it at the end of this turn of reading: slots that were read in one turn
        are returned together, in one note.
        """
        self._on_return(number)

    def close(self) -> None:
        """Return no slot any more; a tensor that lives on keeps nothing but its memory."""
        self._port = None

    def _on_return(self, number: int) -> None:
        self._back.append(number)
        port = self._port
        if port is not None and not self._called:
            self._called = True
            port.call(self._tell)

    def _tell(self) -> None:
        self._called = False
        words = bytearray()
        while self._back:
            try:
                number = self._back.popleft()
            except IndexError:  # another thread was faster
                break
            self._lent.discard(number)
            if number in self._forked:
                self._forked.discard(number)
                number |= _UNUSABLE
            words += _WORD.pack(number)
        port = self._port
        if words and port is not None:
            port.note(bytes(words))


def returned_slots(note: bytes) -> Iterator[tuple[int, bool]]:
    """Decode a note of `SlotReturns`: each returned slot's number, and whether it is usable.

    Raises:
        ValueError: it is no such note.
    """
    if len(note) % _WORD.size:
        raise ValueError(f"a note of {len(note)} bytes")
    for (word,) in _WORD.iter_unpack(note):
        yield word & ~_UNUSABLE, not word & _UNUSABLE


def _mark_all() -> None:
    for reference in tuple(_all.values()):  # in one step: other threads make and drop some
        returns = reference()
        if returns is not None:
            returns._forked.update(tuple(returns._lent))


# Twice: what another thread lends, and what it lets go of, between the two is marked as well.
os.register_at_fork(before=_mark_all, after_in_parent=_mark_all)
