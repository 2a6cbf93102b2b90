"""The part of the double that is about devices, and what all its parts need."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tests.cupy import codes
from tests.cupy.codes import CUDARuntimeError, Status
from tests.cupy.streams import Progress, Stream

if TYPE_CHECKING:
    from typing import Self

    from tests.cupy.machine import DoubleConfig, Gpu

__all__ = ["OWN", "Device", "call", "status_of"]

F = TypeVar("F", bound=Callable[..., Any])

OWN = frozenset({"close", "config", "fail", "pause", "resume", "undefined"})
"""Names of a double that CuPy has not."""


def call(function: F) -> F:
    """A function that fails where all do: after an error that stays, at the end, in a fork."""

    @functools.wraps(function)
    def checked(self: Device, *args: Any, **kwargs: Any) -> Any:
        self._check(function.__name__)
        return function(self, *args, **kwargs)

    return cast("F", checked)


def status_of(function: Callable[[Any, int], None]) -> Callable[[Any, int], int]:
    """A function that returns the status and never raises."""

    @functools.wraps(function)
    def tried(self: Any, handle: int) -> int:
        try:
            function(self, handle)
        except CUDARuntimeError as error:
            return error.status
        return 0

    return tried


class Device:
    """A process's devices and streams; see `tests.cupy.double.CudaDouble`."""

    CUDARuntimeError = codes.CUDARuntimeError

    streamDefault = 0
    streamNonBlocking = 1

    def __init__(self, config: DoubleConfig, place: int = 0) -> None:
        self.config = config
        self.undefined: list[str] = []
        self._pid = os.getpid()
        self._name = f"{config.seed}/{place}"
        self._progress = Progress()
        self._stream_handles: dict[int, Stream] = {}
        self._streams: dict[int, Stream] = {}  # all that were ever made, by their numbers
        self._default_streams: dict[Gpu, Stream] = {}
        self._handles = count(0x7000_0000_0000, 0x40)
        self._current = threading.local()
        self._paused = False

    # -- its own

    def fail(self, status: int) -> None:
        """Have an error happen that stays: no work is done any more, all calls report it."""
        self._progress.fail(status)

    def pause(self, stream: int | None = None) -> None:
        """Have a stream, or each one, begin no further operation."""
        self._set_paused(stream, paused=True)

    def resume(self, stream: int | None = None) -> None:
        """Have it go on."""
        self._set_paused(stream, paused=False)

    def _set_paused(self, stream: int | None, *, paused: bool) -> None:
        with self._progress.changed:
            if stream is None:
                self._paused = paused
            chosen = self._streams.values() if stream is None else [self._stream(stream)]
            for one in chosen:
                one.paused = paused
            self._progress.changed.notify_all()

    def close(self) -> None:
        """End all threads, whatever they wait for, and give back all memory."""
        if self._progress.closing or os.getpid() != self._pid:
            return
        self._progress.close()
        for stream in list(self._streams.values()):
            stream.join()
        self._give_back()

    def _give_back(self) -> None:
        """Let go of what the parts hold; all threads have ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check(self, name: str) -> None:
        if os.getpid() != self._pid:
            raise CUDARuntimeError(Status.cudaErrorInitializationError)
        if self._progress.closing:
            raise CUDARuntimeError(Status.cudaErrorCudartUnloading)
        if not self.config.driver_version:
            raise CUDARuntimeError(Status.cudaErrorInsufficientDriver)
        status = self._progress.error or self.config.fails.get(name, 0)
        if status:
            raise CUDARuntimeError(status)

    # -- devices

    def driverGetVersion(self) -> int:
        return self.config.driver_version

    def runtimeGetVersion(self) -> int:
        return 12090

    @call
    def getDeviceCount(self) -> int:
        if not self.config.gpus:
            raise CUDARuntimeError(Status.cudaErrorNoDevice)
        return len(self.config.gpus)

    @call
    def getDevice(self) -> int:
        return self._ordinal

    @call
    def setDevice(self, device: int) -> None:
        self._gpu(device)
        self._current.ordinal = device

    @call
    def getDeviceProperties(self, device: int) -> dict[str, object]:
        return self._gpu(device).properties()

    @call
    def deviceGetPCIBusId(self, device: int) -> str:
        return self._gpu(device).pci_bus_id

    @call
    def deviceCanAccessPeer(self, device: int, peerDevice: int) -> int:
        one, other = self._gpu(device), self._gpu(peerDevice)
        return int(one != other and (one, other) not in self.config.denied)

    @call
    def deviceSynchronize(self) -> None:
        gpu = self._gpu(self._ordinal)
        self._drain(lambda stream: stream.gpu == gpu)

    @property
    def _ordinal(self) -> int:
        """The current device; each thread has its own."""
        ordinal: int = getattr(self._current, "ordinal", 0)
        return ordinal

    def _gpu(self, device: int) -> Gpu:
        if not 0 <= device < len(self.config.gpus):
            raise CUDARuntimeError(Status.cudaErrorInvalidDevice)
        return self.config.gpus[device]

    def _drain(self, chosen: Callable[[Stream], bool] = lambda stream: True) -> None:
        with self._progress.changed:
            waits = [stream.until_now() for stream in self._streams.values() if chosen(stream)]
        for done in waits:
            self._progress.must(done)

    # -- streams by their handles

    def _new_stream(self, gpu: Gpu) -> Stream:
        number = len(self._streams)
        stream = Stream(self._progress, gpu, f"{self._name}/{number}", self.config.delay_s)
        stream.paused = self._paused
        self._streams[number] = stream
        return stream

    def _stream(self, handle: int) -> Stream:
        with self._progress.changed:
            if handle == 0:
                gpu = self._gpu(self._ordinal)
                if gpu not in self._default_streams:
                    self._default_streams[gpu] = self._new_stream(gpu)
                return self._default_streams[gpu]
            if handle not in self._stream_handles:
                raise CUDARuntimeError(Status.cudaErrorInvalidResourceHandle)
            return self._stream_handles[handle]
