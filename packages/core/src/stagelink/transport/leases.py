"""Leases: memory lent to tensors, returned when the last view of it dies.

A lease is a ctypes array over the memory; torch's storage keeps it alive, and with it every view,
reinterpretation and autograd graph. Its finalizer may run on any thread, in the middle of garbage
collection, so all it does is to append to a deque.
"""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stagelink.transport.contract import Port

__all__ = ["SlotReturns", "lease", "returned_slots"]

_WORD = struct.Struct("<I")
_UNUSABLE = 1 << 31

_all: dict[int, weakref.ref[SlotReturns]] = {}


def lease(memory: torch.Tensor, size_bytes: int, on_return: Callable[[], object]) -> torch.Tensor:
    """Lend the first bytes of memory as a flat uint8 tensor; its storage has exactly that size.

    Args:
        memory: a CPU tensor; it is kept alive.
        size_bytes: at least 1.
        on_return: called when the last view has died, on any thread, in the middle of anything:
            it must take no lock. Not called at exit.
    """
    owner = (ctypes.c_ubyte * size_bytes).from_address(memory.data_ptr())
    weakref.finalize(owner, _end, memory, on_return).atexit = False
    return torch.frombuffer(owner, dtype=torch.uint8)


def _end(memory: torch.Tensor, on_return: Callable[[], object]) -> None:
    del memory  # kept until now
    on_return()


class SlotReturns:
    """The receiving end of a `stagelink.transport.slots.SlotRing`: lends slots and returns them.

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

    def _mark_forked(self) -> None:
        self._forked.update(tuple(self._lent))


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
            returns._mark_forked()


# Twice: what another thread lends, and what it lets go of, between the two is marked as well.
os.register_at_fork(before=_mark_all, after_in_parent=_mark_all)
