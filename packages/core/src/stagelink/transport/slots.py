"""Slots: pieces of memory that both ends of a link see, each for one message at a time.

The sender owns them, whatever memory they are made of: it makes a slot when it needs one, fills
it, and tells the receiver its number. The receiver reads it and returns the number, at once or
when the last tensor that is a view of the slot has died. Until then the slot is *out*, else
*free*.

Few slots that are used again and again stay in the processor's cache, so the one that was returned
last is the next to be used, and none is made before all that fit are out.
"""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Generic, TypeVar

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
_FREE, _SPENT = 1, 2

_all: dict[int, weakref.ref[SlotReturns]] = {}


class Slot(Generic[_M]):
    """One slot, by the number that the two ends call it; used again when the slot is given up."""

    __slots__ = ("capacity_bytes", "kept", "memory", "number", "size_bytes")

    def __init__(self, number: int, capacity_bytes: int, memory: _M) -> None:
        self.number = number
        self.capacity_bytes = capacity_bytes
        self.memory = memory
        self.kept = False  # whether the receiver may hold on to it for as long as it likes
        self.size_bytes = 0  # of the message it was last taken for, if no smaller slot holds that


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
        self.most = min(max(most, 2 * _RESERVE), _MOST)  # limit of slots, as it is now
        # the most that a slot holds
        self.largest_bytes = bound_bytes // _LARGEST_SHARE // granule_bytes * granule_bytes
        self._make = make
        self._bound_bytes = bound_bytes
        self._granule_bytes = granule_bytes
        self._bytes = 0
        self._kept_bytes = 0
        self._kept = 0
        self._free: list[Slot[_M]] = []  # what was returned last is at the end
        self.out: dict[int, Slot[_M]] = {}  # by number
        self._numbers: list[int] = []
        self.gone: list[int] = []  # given up, and the receiver is not told; see `given_up`

    def take(self, size_bytes: int) -> Slot[_M] | None:
        """Take a slot for a message of up to ``largest_bytes``; None until one is returned.

        Where the bound leaves no memory for a slot of the wanted size, free slots that are too
        small are given up, those first that have been free longest.
        """
        free = self._free
        if free and free[-1].size_bytes == size_bytes:  # made for this size, as none fits better
            found = free.pop()
            self.out[found.number] = found
            return found
        return self._take_best(size_bytes)

    def _take_best(self, size_bytes: int) -> Slot[_M] | None:
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
        self.out[found.number] = found
        found.size_bytes = size_bytes if found.capacity_bytes == capacity else 0
        return found

    def given_up(self) -> list[int]:
        """Numbers of slots that were given up since the last call, for the receiver.

        It has them mapped until it is told, so it is told before it hears of a new slot.
        """
        numbers, self.gone = self.gone, []
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
        """Free a slot that the receiver has returned; `ValueError` where it was not out."""
        slot = self.out.pop(number, None)
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
        self.out.clear()
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
        return len(self.out) + len(self._free)

    def _enough_if_given_up(self, capacity: int) -> bool:
        free = sum(slot.capacity_bytes for slot in self._free)
        fits = self._bytes - free + capacity <= self._bound_bytes
        return bool(self._free) and fits and len(self.out) < self.most

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
        self.gone.append(slot.number)


class SlotBoard:
    """Slots that a link's receiver has returned, in memory that both ends see: a byte for each.

    So a return is no message: the receiver sets a byte, and the sender looks when it next needs a
    slot. Nothing of a slot is still being read by then, on any processor: it is returned after the
    last tensor with its memory has died, and torch counts those in an order that holds everywhere.

    Args:
        memory: `SlotBoard.BYTES` bytes, zero at first; kept.
    """

    BYTES: ClassVar[int] = _MOST

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._states = (ctypes.c_ubyte * _MOST).from_address(memory.data_ptr())

    def post(self, number: int, *, usable: bool) -> None:
        """Return a slot; at the receiver, on any thread, in the middle of anything."""
        self._states[number] = _FREE if usable else _SPENT

    def collect(self) -> Sequence[tuple[int, bool]]:
        """Take what has been returned: each slot's number, and whether it may be used again."""
        states, found = bytes(self._states), []
        for state in (_FREE, _SPENT):
            number = states.find(state)
            while number >= 0:
                self._states[number] = 0
                found.append((number, state == _FREE))
                number = states.find(state, number + 1)
        return found


class SlotReturns:
    """The receiving end of a `SlotRing`: lends slots and returns them on a `SlotBoard`.

    What is on loan when the process forks is not used again: a data-loader worker that holds a
    received tensor would see it rewritten. The memory is shared with it all the same: what parent
    or child write into the tensor, both see.

    A sender that has no slot asks, and has an answer, a note that is empty, as soon as it may find
    one on the board.
    """

    def __init__(self, port: Port) -> None:
        self.board: SlotBoard | None = None  # until it has come from the sender
        self._port: Port | None = port
        self._process = os.getpid()
        self._lent: set[int] = set()
        self._forked: set[int] = set()
        self._asked = self._news = False
        number = id(self)
        _all[number] = weakref.ref(self, lambda _: _all.pop(number, None))

    def lend(self, number: int, memory: torch.Tensor, size_bytes: int) -> torch.Tensor:
        """Lend a slot's message as a tensor; the slot is returned when its last view has died.

        `ValueError` where the slot is on loan already.
        """
        if number in self._lent:
            raise ValueError(f"slot {number} came again before it was returned")
        self._lent.add(number)
        return lease(memory, size_bytes, partial(self.release, number))

    def release(self, number: int) -> None:
        """Return a slot; from any thread, a finalizer too: takes no lock."""
        port, board = self._port, self.board
        if port is None or board is None or self._process != os.getpid():
            return  # in a fork it is the parent's to return
        self._lent.discard(number)
        forked = number in self._forked
        if forked:
            self._forked.discard(number)
        board.post(number, usable=not forked)
        self._news = True
        if self._asked:
            self._asked = False
            port.call(self._answer)

    def ask(self) -> None:
        """The sender has no slot; on the reading thread."""
        self._asked = True
        if self._news:
            self._answer()

    def _answer(self) -> None:
        self._asked = self._news = False
        port = self._port
        if port is not None:
            port.note(b"")

    def close(self) -> None:
        """Return no slot any more; a tensor that lives on keeps nothing but its memory."""
        self._port = self.board = None


def returned_slots(note: bytes) -> Iterator[tuple[int, bool]]:
    """Decode a note that returns slots, to numbers and whether each is usable; or `ValueError`."""
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
