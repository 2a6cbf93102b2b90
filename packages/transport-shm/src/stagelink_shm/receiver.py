"""The receiving end: a message's tensor is a view of its slot, or a copy where slots are short."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from stagelink.transport.contract import Receiver
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.slots import SlotBoard, SlotReturns
from stagelink_shm.memory import copy_bytes, mapped
from stagelink_shm.notes import BOARD, SHORT, Filled, given_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import Deadline, Done, Port
    from stagelink.transport.header import Header

__all__ = ["ShmReceiver"]

_LEAST_VIEW_BYTES = 32 * 1024
"""Below this a copy costs less than a lease."""


class ShmReceiver(Receiver):
    """The receiving end.

    Args:
        port: of the link.
    """

    def __init__(self, port: Port) -> None:
        self._port = port
        self._returns = SlotReturns(port)
        self._slots: dict[int, torch.Tensor] = {}
        self._pieces: deque[Filled] = deque()
        self._assemblies: deque[_Assembly] = deque()
        self._lock = threading.RLock()  # the next message begins in ``done`` of the one before

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """Take the message out of its slot, or begin to put its pieces together.

        Raises:
            ValueError: the note is none of a `stagelink_shm.sender.ShmSender`.
            RuntimeError: the slot cannot be mapped.
        """
        size = header.payload_bytes
        if not size:
            accept()
            done()
            return
        if not note:
            self._assemble(_Assembly(accept(), done))
            return
        with self._lock:
            number, keep, filled_bytes = self._look(note, fds)
            slot = self._slots[number]
        if filled_bytes != size:
            raise ValueError(f"slot {number} has {filled_bytes} bytes of {size}")
        if keep and size >= _LEAST_VIEW_BYTES:
            done(self._returns.lend(number, slot, size))
            return
        copy_bytes(accept(), slot[:size])
        self._returns.release(number)
        done()

    def _look(self, note: bytes, fds: Sequence[int]) -> Filled:
        """What the note says, with its slot mapped."""
        try:
            filled = Filled.unpack(note)
            for descriptor in fds:
                self._slots[filled.number] = mapped(descriptor)
        finally:
            if fds:
                close_all(fds)
        slot = self._slots.get(filled.number)
        if slot is None or slot.numel() < filled.size_bytes:
            raise ValueError(f"slot {filled.number} is not of {filled.size_bytes} bytes")
        if self._returns.board is None or filled.number >= SlotBoard.BYTES:
            raise ValueError(f"slot {filled.number} cannot be returned: it is on no board")
        return filled

    def _see_board(self, fds: Sequence[int]) -> None:
        try:
            (memory,) = map(mapped, fds)
        finally:
            close_all(fds)
        if memory.numel() < SlotBoard.BYTES:
            raise ValueError(f"a board of {memory.numel()} bytes, not {SlotBoard.BYTES}")
        self._returns.board = SlotBoard(memory)

    def _assemble(self, assembly: _Assembly) -> None:
        with self._lock:
            self._assemblies.append(assembly)
            self._put_together()

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """A piece has come, slots are no more, or the sender has none."""
        if note == SHORT:
            self._returns.ask()
            return
        try:
            with self._lock:
                if note == BOARD:
                    self._see_board(fds)
                    return
                gone = given_up(note)
                if gone is not None:
                    for number in gone:
                        self._slots.pop(number, None)
                    return
                self._pieces.append(self._look(note, fds))
                self._put_together()
        except (OSError, RuntimeError, ValueError) as error:
            if stops_caller(error):
                raise
            self._port.fail(error)

    def _put_together(self) -> None:
        # A piece may come before its message has begun here, where others are unfinished.
        while self._pieces and self._assemblies:
            filled = self._pieces.popleft()
            self._assemblies[0].add(self._slots[filled.number][: filled.size_bytes])
            self._returns.release(filled.number)
            if self._assemblies[0].whole:
                self._assemblies.popleft().done()

    def close(self, deadline: Deadline) -> None:
        """Let go; tensors that live on keep their slots' memory."""
        del deadline
        self._returns.close()
        with self._lock:
            self._slots.clear()
            self._pieces.clear()
            self._assemblies.clear()


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that came."""
    for descriptor in descriptors:
        os.close(descriptor)


class _Assembly:
    """A message that comes in pieces."""

    def __init__(self, buffer: torch.Tensor, done: Done) -> None:
        self.done = done
        self._buffer = buffer
        self._filled_bytes = 0

    @property
    def whole(self) -> bool:
        return self._filled_bytes == self._buffer.numel()

    def add(self, piece: torch.Tensor) -> None:
        begin = self._filled_bytes
        copy_bytes(self._buffer[begin:], piece)
        self._filled_bytes += piece.numel()
