"""The sending end: one copy into a slot, and the slot's number beside the header."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from stagelink.transport.contract import Sender
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.slots import SlotBoard
from stagelink_shm.memory import mapped, new_memory
from stagelink_shm.notes import BOARD, SHORT, pack_filled, pack_given_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import Announce, Deadline, Done, Message, Port
    from stagelink.transport.slots import Slot, SlotRing

    Tell = Callable[[bytes, Sequence[int]], None]

__all__ = ["SPARE_SLOTS", "SharedMemory", "ShmSender"]

SPARE_SLOTS = 2
"""Slots beyond the windows: one that is being filled, one whose return takes a moment."""

_PIECE_BYTES = 4 * 1024 * 1024


class ShmSender(Sender):
    """The sending end.

    Args:
        port: of the link.
        ring: its slots, none of them made yet.
    """

    def __init__(self, port: Port, ring: SlotRing[SharedMemory]) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._ring = ring
        self._board: SlotBoard | None = None
        self._short = False
        self._passing = threading.Lock()
        self._leaving: deque[_InPieces] = deque()

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """Copy the payload into a slot, if there is one; more than a slot holds goes in pieces.

        Raises:
            OSError: the system has no memory for a slot.
        """
        size = message.header.payload_bytes
        if not size:
            announce()
            done()
            return True
        if size > self._ring.largest_bytes:
            payload = self._port.buffer(size).copy_(message.payload)
            announce()
            pieces = payload.split(min(_PIECE_BYTES, self._ring.largest_bytes))
            self._leaving.append(_InPieces(deque(pieces), done))
            self._pass_pieces()
            return True
        if not self._pass(message.payload, announce, keep=True):
            return False
        done()
        return True

    def _pass_pieces(self) -> None:
        """Send pieces in notes for as long as there are slots, unless another thread is at it."""
        while self._leaving and not self._short and self._passing.acquire(blocking=False):
            try:
                self._pass_piece(self._leaving[0])
            finally:
                self._passing.release()

    def _pass_piece(self, leaving: _InPieces) -> None:
        try:
            if self._pass(leaving.pieces[0], self._port.note, keep=False):
                leaving.pieces.popleft()
        except OSError as error:
            if stops_caller(error):
                raise
            self._leaving.popleft()
            leaving.done.failed(error)
            return
        if not leaving.pieces:
            self._leaving.popleft()
            leaving.done()

    def _pass(self, payload: torch.Tensor, tell: Tell, *, keep: bool) -> bool:
        size = payload.numel()
        with self._lock:
            slot = self._take(size)
            if slot is None:
                return False
            keep = keep and self._ring.may_keep(slot)
        ctypes.memmove(slot.memory.address, payload.data_ptr(), size)
        note = pack_filled(slot.number, keep, size)
        if slot.memory.descriptor is None:
            tell(note, ())
        else:
            slot.memory.tell(tell, note)
        return True

    def _take(self, size: int) -> Slot[SharedMemory] | None:
        """A slot for so many bytes; where there is none the receiver is asked for one."""
        ring = self._ring
        if self._board is None:
            memory = SharedMemory(SlotBoard.BYTES)
            memory.tell(self._port.note, BOARD)
            self._board = SlotBoard(memory.bytes)
        for number, usable in self._board.collect():
            ring.give_back(number, usable=usable)
        if len(ring.out) + SPARE_SLOTS >= ring.most:
            ring.grow(self._port.window + SPARE_SLOTS)
        slot = ring.take(size)
        if ring.gone:
            self._port.note(pack_given_up(ring.given_up()))
        if slot is None and not self._short:
            self._short = True
            self._port.note(SHORT)
        return slot

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """A slot has been returned since this end asked for one."""
        del fds
        if note:
            self._port.fail(ValueError(f"a note of {len(note)} bytes, where an empty one is due"))
            return
        with self._lock:
            self._short = False
        self._pass_pieces()
        self._port.room()

    def close(self, deadline: Deadline) -> None:
        """Let go of the slots; the receiver keeps what it still looks at."""
        del deadline
        with self._lock:
            self._ring.clear()
            self._board = None


class _InPieces(NamedTuple):
    """What is left to be sent of a message larger than a slot."""

    pieces: deque[torch.Tensor]
    done: Done


class SharedMemory:
    """Memory of a slot, and its descriptor until the receiver has it.

    Attributes:
        bytes: all of it, as a flat uint8 tensor.
        address: where that begins.
        descriptor: None once it is closed.

    Raises:
        OSError: the system has none to give.
        RuntimeError: there is no address space left.
    """

    def __init__(self, capacity_bytes: int) -> None:
        descriptor = new_memory(capacity_bytes)
        try:
            self.bytes = mapped(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self.address = self.bytes.data_ptr()
        self.descriptor: int | None = descriptor

    def tell(self, tell: Tell, note: bytes) -> None:
        """Send a note with the descriptor, and close that."""
        descriptor, self.descriptor = self.descriptor, None
        try:
            tell(note, () if descriptor is None else (descriptor,))
        finally:
            if descriptor is not None:
                os.close(descriptor)
