"""Events of the double: a few words of shared memory, of use in every process that opens them.

A record counts when it is called, before its stream comes to it. Who waits looks up, when it calls
the wait, which record is the latest.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections import deque
from typing import TYPE_CHECKING

from stagelink_shm.memory import mapped, new_memory
from tests.cupy.codes import CUDARuntimeError, Status
from tests.cupy.memory import Handle, open_exported

if TYPE_CHECKING:
    import threading

    import torch

__all__ = ["Event", "Events"]

_RECORDS = 14
"""How many records of an event can be under way at once."""

_EVENTS = 4096
"""How many events a process can have at once."""


class _Words(ctypes.Structure):
    """An event in shared memory. Each word is written in one go."""

    _fields_ = (
        ("token", ctypes.c_uint64),  # 0: destroyed
        ("recorded", ctypes.c_uint64),  # records called so far
        ("done", ctypes.c_uint64 * _RECORDS),  # at n modulo its length: record n, once it is done
    )
    token: int
    recorded: int
    done: ctypes.Array[ctypes.c_uint64]

    def is_done(self, record: int) -> bool:
        return bool(self.done[record % _RECORDS] >= record)


class Event:
    """One event, made here or opened from another process.

    Args:
        memory: of the process that made it.
        number: its place there.
        uuid: of its GPU.
        flags: that it was made with.
    """

    def __init__(self, memory: torch.Tensor, number: int, uuid: bytes, flags: int) -> None:
        self.memory = memory  # as long as this lives, the words stay mapped
        self._words = _Words.from_address(memory.data_ptr() + number * ctypes.sizeof(_Words))
        self.number = number
        self.uuid = uuid
        self.flags = flags
        self.token = self._words.token

    @property
    def alive(self) -> bool:
        """Whether the process that made it has not destroyed it."""
        return self._words.token == self.token

    @property
    def recorded(self) -> int:
        """The latest record that was called."""
        return self._words.recorded

    def record(self) -> int:
        """A record is called; its number."""
        self._words.recorded += 1
        return self._words.recorded

    def is_done(self, record: int) -> bool:
        return self._words.is_done(record)

    def finish(self, record: int) -> None:
        self._words.done[record % _RECORDS] = record

    def destroy(self) -> None:
        self._words.token = 0


class Events:
    """The events that one process has made or opened.

    Args:
        lock: held whenever they change.
    """

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._descriptor = new_memory(_EVENTS * ctypes.sizeof(_Words))
        self._memory = mapped(self._descriptor)
        self._free = deque(range(_EVENTS))
        self._imported: dict[tuple[int, int, int], torch.Tensor] = {}

    def make(self, uuid: bytes, flags: int) -> Event:
        """A new event.

        Raises:
            CUDARuntimeError: there are too many.
        """
        with self._lock:
            for _ in range(len(self._free)):
                number = self._free.popleft()
                place = self._memory.data_ptr() + number * ctypes.sizeof(_Words)
                words = _Words.from_address(place)
                if words.is_done(words.recorded):  # else of one destroyed before it was done
                    words.token = secrets.randbits(63) + 1
                    return Event(self._memory, number, uuid, flags)
                self._free.append(number)
        raise CUDARuntimeError(Status.cudaErrorMemoryAllocation)

    def destroy(self, event: Event) -> None:
        """Destroy an event that was made here, or let go of one that was opened."""
        if event.memory is self._memory:
            with self._lock:
                event.destroy()
                self._free.append(event.number)

    def export(self, event: Event) -> bytes:
        """Its handle."""
        return Handle(
            *(b"event", os.getpid(), self._descriptor, event.number, event.token, event.uuid)
        ).pack()

    def open(self, handle: Handle) -> Event:
        """An event of another process.

        Raises:
            CUDARuntimeError: there is no such event.
        """
        descriptor = open_exported(handle)
        try:
            status = os.fstat(descriptor)
            key = (handle.pid, status.st_dev, status.st_ino)
            if status.st_size != self._memory.numel():
                raise CUDARuntimeError(Status.cudaErrorMapBufferObjectFailed)
            with self._lock:
                if key not in self._imported:
                    self._imported[key] = mapped(descriptor)
        finally:
            os.close(descriptor)
        event = Event(self._imported[key], handle.place, handle.uuid, 0)
        if event.token != handle.token:
            raise CUDARuntimeError(Status.cudaErrorMapBufferObjectFailed)
        return event

    def close(self) -> None:
        """Give back what the events are kept in; those in use keep it a while longer."""
        with self._lock:
            self._imported.clear()
            self._memory = self._memory.new_empty(0)
            os.close(self._descriptor)
