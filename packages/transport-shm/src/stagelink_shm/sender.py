"""The sending end: one copy into a slot, and the slot's number beside the header."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from stagelink.transport.contract import FINISHED, Pending, Sender
from stagelink.transport.slots import returned_slots
from stagelink_shm.memory import copy_bytes, mapped, new_memory
from stagelink_shm.notes import Filled, pack_given_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import Announce, Deadline, Message, Port
    from stagelink.transport.slots import SlotRing

    Tell = Callable[[bytes, Sequence[int]], None]

__all__ = ["SPARE_SLOTS", "SharedMemory", "ShmSender"]

SPARE_SLOTS = 2
"""Slots beyond the windows: one that is being filled, one whose way home takes a moment."""

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

    def begin(self, message: Message, announce: Announce) -> Pending | None:
        """Copy the payload into a slot, if there is one; more than a slot holds goes in pieces.

        Raises:
            OSError: the system has no memory for a slot.
        """
        size = message.header.payload_bytes
        if not size:
            announce()
            return FINISHED
        if size > self._ring.largest_bytes:
            payload = self._port.buffer(size).copy_(message.payload)
            announce()
            return _Pieces(self, payload)
        return FINISHED if self._pass(message.payload, announce, keep=True) else None

    def pass_in_pieces(self, payload: torch.Tensor, deadline: Deadline) -> None:
        """Send a payload in notes, as slots come home for it.

        Raises:
            TimeoutError: the deadline passed.
            StagelinkError: the handler failed or was closed.
        """
        for piece in payload.split(min(_PIECE_BYTES, self._ring.largest_bytes)):
            while not self._pass(piece, self._port.note, keep=False):
                if not self._port.wait(lambda: not self._short, deadline):
                    raise TimeoutError(f"no slot came home within {deadline.seconds:g} s")

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
            self._port.room()
            self._port.wake()

    def close(self, deadline: Deadline) -> None:
        """Let go of the slots; the receiver keeps what it still looks at."""
        del deadline
        with self._lock:
            self._ring.clear()


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


class _Pieces(Pending):
    def __init__(self, sender: ShmSender, payload: torch.Tensor) -> None:
        self._sender = sender
        self._payload = payload

    def finish(self, deadline: Deadline) -> None:
        self._sender.pass_in_pieces(self._payload, deadline)
