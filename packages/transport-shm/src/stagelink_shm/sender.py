"""The sending end: one copy into a slot, and the slot's number beside the header."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from stagelink.transport.contract import Sender
from stagelink.transport.slots import returned_slots
from stagelink_shm.memory import copy_bytes, mapped, new_memory
from stagelink_shm.notes import Filled, pack_given_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import Announce, Deadline, Done, Message, Port
    from stagelink.transport.slots import SlotRing

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
            self._leaving.popleft()
            leaving.done.failed(error)
            return
        if not leaving.pieces:
            self._leaving.popleft()
            leaving.done()

    def _pass(self, payload: torch.Tensor, tell: Tell, *, keep: bool) -> bool:
        size = payload.numel()
        with self._lock:
            self._ring.grow(self._port.window + SPARE_SLOTS)
            slot = self._ring.take(size)
            gone = self._ring.given_up()
            if gone:
                self._port.note(pack_given_up(gone))
            if slot is None:
                self._short = True
                return False
            keep = keep and self._ring.may_keep(slot)
        copy_bytes(slot.memory.bytes, payload)
        slot.memory.tell(tell, Filled(slot.number, keep, size).pack())
        return True

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """Slots have come home."""
        del fds
        try:
            with self._lock:
                for number, usable in returned_slots(note):
                    self._ring.give_back(number, usable=usable)
                short, self._short = self._short, False
        except ValueError as error:
            self._port.fail(error)
            return
        if short:
            self._pass_pieces()
            self._port.room()

    def close(self, deadline: Deadline) -> None:
        """Let go of the slots; the receiver keeps what it still looks at."""
        del deadline
        with self._lock:
            self._ring.clear()


class _InPieces(NamedTuple):
    """What is left to be sent of a message larger than a slot."""

    pieces: deque[torch.Tensor]
    done: Done


class SharedMemory:
    """Memory of a slot, and its descriptor until the receiver has it.

    Attributes:
        bytes: all of it, as a flat uint8 tensor.

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
        self._descriptor: int | None = descriptor

    def tell(self, tell: Tell, note: bytes) -> None:
        """Send a note, the first time with the descriptor."""
        if self._descriptor is None:
            tell(note, ())
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            tell(note, (descriptor,))
        finally:
            os.close(descriptor)
