"""One link's memory on the device, and the events of its slots, as one of the ends has them.

The sender allocates the memory, the receiver opens it. Each slot has an event of the sender's,
"filled", and one of the receiver's, "read": the end that made an event records it, the other waits
for it. Where the host orders the copies there are no events.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SLOTS", "Region"]

SLOTS = 8
_HANDLE_BYTES = 64


class Region:
    """The memory and events of one link. CUDA's functions raise ``CUDARuntimeError``.

    Args:
        rt: the module with CUDA's functions.
        device: number of the GPU.
        stream: handle of the stream that copies.
        size_bytes: of all slots.

    Attributes:
        size_bytes: as given.
        slot_bytes: of each slot.
        exported: whether the twin may have opened what this end made.
    """

    def __init__(self, rt: Any, device: int, stream: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.slot_bytes = size_bytes // SLOTS
        self.exported = False
        self._rt = rt
        self._device = device
        self._stream = stream
        self._memory = 0
        self._opened_memory = 0
        self._events: list[int] = []
        self._opened_events: list[int] = []

    def use(self) -> None:
        """Make its GPU the current one of this thread, for CuPy as well."""
        self._rt.setDevice(self._device)

    def allocate(self) -> None:
        """Take the memory; the sender's to do."""
        self._memory = self._rt.malloc(self.size_bytes)

    def make_events(self) -> None:
        """Make this end's events; all of them now, never again later."""
        flags = self._rt.eventInterprocess | self._rt.eventDisableTiming
        while len(self._events) < SLOTS:
            self._events.append(self._rt.eventCreateWithFlags(flags))

    @property
    def device_ordered(self) -> bool:
        """Whether there are events."""
        return bool(self._events)

    def handles(self) -> bytes:
        """Export all that this end made, for the twin's `open`."""
        memory = [self._rt.ipcGetMemHandle(self._memory)] if self._memory else []
        handles = b"".join([*memory, *map(self._rt.ipcGetEventHandle, self._events)])
        self.exported = True
        return handles

    def open(self, handles: bytes) -> None:
        """Open what the twin made."""
        starts = range(0, len(handles), _HANDLE_BYTES)
        each = [handles[start : start + _HANDLE_BYTES] for start in starts]
        if not self._memory:
            self._opened_memory = self._rt.ipcOpenMemHandle(each.pop(0))
        for handle in each:
            self._opened_events.append(self._rt.ipcOpenEventHandle(handle))

    @property
    def owned(self) -> bool:
        """Whether this end has made something."""
        return bool(self._memory or self._events)

    def address(self, slot: int) -> int:
        """The address of a slot in this process."""
        return (self._memory or self._opened_memory) + slot * self.slot_bytes

    def copy(self, slot: int, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy into a slot, or out of it: after the twin's use of it, and before its next.

        With events the twin must have recorded its own before this is called, and may be told of
        this use as soon as this returns: a wait sees only what was recorded before it.
        """
        if self._opened_events:
            self._rt.streamWaitEvent(self._stream, self._opened_events[slot])
        kind = self._rt.memcpyDefault
        self._rt.memcpyAsync(target, source, size_bytes, kind, self._stream)
        if self._events:
            self._rt.eventRecord(self._events[slot], self._stream)

    def close(self) -> None:
        """Close what was opened; waits for the device, so let it come to rest before."""
        while self._opened_events:
            self._rt.eventDestroy(self._opened_events.pop())
        memory, self._opened_memory = self._opened_memory, 0
        if memory:
            self._rt.ipcCloseMemHandle(memory)

    def free(self) -> None:
        """Give back what this end made, once nobody has it open; waits for the device."""
        while self._events:
            self._rt.eventDestroy(self._events.pop())
        memory, self._memory = self._memory, 0
        if memory:
            self._rt.free(memory)
