"""The part of the double that is about streams and events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.cupy.codes import CUDARuntimeError, Status
from tests.cupy.device import Device, call, status_of
from tests.cupy.events import Event, Events
from tests.cupy.memory import Handle

if TYPE_CHECKING:
    from tests.cupy.machine import DoubleConfig

__all__ = ["Queues"]


class Queues(Device):
    """A process's streams and events; see `tests.cupy.double.CudaDouble`."""

    eventDefault = 0
    eventBlockingSync = 1
    eventDisableTiming = 2
    eventInterprocess = 4

    def __init__(self, config: DoubleConfig, place: int = 0) -> None:
        super().__init__(config, place)
        self._events = Events(self._progress.changed)
        self._event_handles: dict[int, Event] = {}

    def _give_back(self) -> None:
        self._event_handles.clear()
        self._events.close()
        super()._give_back()

    # -- streams

    @call
    def streamCreateWithFlags(self, flags: int) -> int:
        if flags not in (self.streamDefault, self.streamNonBlocking):
            raise CUDARuntimeError(Status.cudaErrorInvalidValue)
        with self._progress.changed:
            handle = next(self._handles)
            self._stream_handles[handle] = self._new_stream(self._gpu(self._ordinal))
        return handle

    @call
    def streamDestroy(self, stream: int) -> None:
        self._stream(stream)
        if stream not in self._stream_handles:
            raise CUDARuntimeError(Status.cudaErrorInvalidResourceHandle)
        self._stream_handles.pop(stream).destroy()

    @call
    def streamSynchronize(self, stream: int) -> None:
        self._progress.must(self._stream(stream).until_now())

    @status_of
    @call
    def streamQuery(self, stream: int) -> None:
        if not self._stream(stream).idle:
            raise CUDARuntimeError(Status.cudaErrorNotReady)

    @call
    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        if flags:
            raise CUDARuntimeError(Status.cudaErrorInvalidValue)
        found = self._event(event)
        record = found.recorded
        self._stream(stream).push(ready=lambda: found.is_done(record))

    # -- events

    @call
    def eventCreateWithFlags(self, flags: int) -> int:
        timed = not flags & self.eventDisableTiming
        if not 0 <= flags < 8 or (flags & self.eventInterprocess and timed):
            raise CUDARuntimeError(Status.cudaErrorInvalidValue)
        return self._keep(self._events.make(self._gpu(self._ordinal).uuid, flags))

    @call
    def eventDestroy(self, event: int) -> None:
        with self._progress.changed:
            self._events.destroy(self._event(event, destroy=True))
            del self._event_handles[event]

    @call
    def eventRecord(self, event: int, stream: int) -> None:
        found, queue = self._event(event), self._stream(stream)
        if found.uuid != queue.gpu.uuid:
            raise CUDARuntimeError(Status.cudaErrorInvalidResourceHandle)
        with self._progress.changed:
            record = found.record()
            queue.push(act=lambda: found.finish(record))

    @status_of
    @call
    def eventQuery(self, event: int) -> None:
        found = self._event(event)
        if not found.is_done(found.recorded):
            raise CUDARuntimeError(Status.cudaErrorNotReady)

    @call
    def eventSynchronize(self, event: int) -> None:
        found = self._event(event)
        record = found.recorded
        self._progress.must(lambda: found.is_done(record))

    # -- events of other processes

    @call
    def ipcGetEventHandle(self, event: int) -> bytes:
        found = self._event(event)
        if not found.flags & self.eventInterprocess:
            raise CUDARuntimeError(Status.cudaErrorInvalidResourceHandle)
        return self._events.export(found)

    @call
    def ipcOpenEventHandle(self, handle: bytes) -> int:
        return self._keep(self._events.open(Handle.unpack(handle, b"event")))

    def _keep(self, event: Event) -> int:
        with self._progress.changed:
            handle = next(self._handles)
            self._event_handles[handle] = event
        return handle

    def _event(self, handle: int, *, destroy: bool = False) -> Event:
        event = self._event_handles.get(handle)
        if event is None:
            raise CUDARuntimeError(Status.cudaErrorInvalidResourceHandle)
        if not event.alive:
            self.undefined.append("use of an event that was destroyed where it was made")
            if not destroy:
                raise CUDARuntimeError(Status.cudaErrorInvalidResourceHandle)
        return event
