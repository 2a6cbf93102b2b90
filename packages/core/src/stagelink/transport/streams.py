"""Streams of links: where a link's copies are queued, on a device that has streams.

CUDA work is asynchronous: the kernels that compute a sent tensor and the copy that fills a
received one may still be pending; both are only *stream-ordered*. A `Stream` keeps that order.
Core enters it around every ``begin`` of the link, after the message's own `StreamEvent`; what is
handed to the caller comes after the stream's.

`CudaStream` has been run on no GPU yet; what the tests show of it they show by one of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from stagelink.transport.modes import outside_modes


class StreamEvent(ABC):
    """A point in a stream's work: all that was queued before it."""

    @property
    @abstractmethod
    def reached(self) -> bool:
        """Whether that work is done; never blocks.

        Raises:
            Exception: the device failed.
        """


class Stream(ABC):
    """A link's stream.

    Attributes:
        device: where its tensors are.
        handle: the stream as the device's library numbers it; 0 on a device without streams.
    """

    device: torch.device
    handle: int

    @abstractmethod
    def record_caller(self) -> StreamEvent | None:
        """Record what the calling thread has queued, on its own stream; None if all is done."""

    @abstractmethod
    def record(self) -> StreamEvent | None:
        """Record what has been queued on this stream up to now; None if all of it is done."""

    @abstractmethod
    def entered(self, after: StreamEvent | None = None) -> AbstractContextManager[object]:
        """Make it the thread's current stream; what is queued then comes after the event.

        No mode of torch's that the thread is in holds there: see `stagelink.transport.modes`.
        """

    @abstractmethod
    def buffer(self, size_bytes: int) -> torch.Tensor:
        """A flat uint8 tensor on the device, to be written on this stream."""

    @abstractmethod
    def staging(self, size_bytes: int) -> torch.Tensor:
        """A flat uint8 CPU tensor that this stream can copy to and from without holding it up."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between flat uint8 tensors of one size, each on the device or `staging`."""

    @abstractmethod
    def cloned(self, payload: torch.Tensor) -> torch.Tensor:
        """A copy that the caller's later work does not change, made on the caller's stream."""

    @abstractmethod
    def hand_to_caller(self, payload: torch.Tensor, event: StreamEvent) -> None:
        """The caller's stream goes on after the event, and may use the payload."""


def device_here(kind: str) -> torch.device:
    """Device of a stage's tensors on this kind of device: for CUDA, the current one."""
    if kind != "cuda":
        return torch.device(kind)
    return torch.device(kind, torch.cuda.current_device())


class HostStream(Stream):
    """Host memory: whatever was called is done.

    Args:
        take: lends buffers.
    """

    device = torch.device("cpu")
    handle = 0

    def __init__(self, take: Callable[[int], torch.Tensor]) -> None:
        self._take = take

    def record_caller(self) -> None:
        """Everything is done."""

    def record(self) -> None:
        """Everything is done."""

    def entered(self, after: StreamEvent | None = None) -> AbstractContextManager[object]:
        """Nothing to enter but the modes to leave."""
        del after
        return outside_modes()

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Take from the pool."""
        return self._take(size_bytes)

    def staging(self, size_bytes: int) -> torch.Tensor:
        """Take from the pool."""
        return self._take(size_bytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once."""
        target.copy_(source)

    def cloned(self, payload: torch.Tensor) -> torch.Tensor:
        """A copy in a buffer from the pool."""
        with outside_modes():
            return self._take(payload.numel()).copy_(payload)

    def hand_to_caller(self, payload: torch.Tensor, event: StreamEvent) -> None:
        """Do nothing: the payload is there."""


class CudaEvent(StreamEvent):
    """An event that has been recorded.

    Args:
        event: the event.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def reached(self) -> bool:
        """Whether CUDA says so."""
        return bool(self.event.query())


class CudaStream(Stream):
    """A CUDA stream on the device that is current where this is made. No GPU has run it yet."""

    def __init__(self) -> None:
        self.device = device_here("cuda")
        self._stream = torch.cuda.Stream(self.device)
        self.handle = self._stream.cuda_stream

    def record_caller(self) -> StreamEvent:
        """An event on the thread's current stream."""
        return self._mark(torch.cuda.current_stream(self.device))

    def record(self) -> StreamEvent:
        """An event on this stream."""
        return self._mark(self._stream)

    @staticmethod
    def _mark(stream: torch.cuda.Stream) -> CudaEvent:
        event = torch.cuda.Event()
        event.record(stream)
        return CudaEvent(event)

    @contextmanager
    def entered(self, after: StreamEvent | None = None) -> Iterator[None]:
        """Enter `torch.cuda.stream`; it sets the thread's device as well."""
        with torch.cuda.stream(self._stream), outside_modes():
            if isinstance(after, CudaEvent):
                self._stream.wait_event(after.event)
            yield

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Allocate by torch, which keeps the memory for this stream."""
        with torch.cuda.stream(self._stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def staging(self, size_bytes: int) -> torch.Tensor:
        """Pinned, from torch's pool of such memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Does not wait for the host: one of the two is pinned, or both are on the device."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def cloned(self, payload: torch.Tensor) -> torch.Tensor:
        """A clone; it is kept until the transport has read it."""
        with outside_modes():
            return payload.clone()

    def hand_to_caller(self, payload: torch.Tensor, event: StreamEvent) -> None:
        """Wait for an event; torch's allocator learns that the memory is used there as well."""
        stream = torch.cuda.current_stream(self.device)
        if isinstance(event, CudaEvent):
            stream.wait_event(event.event)
        payload.record_stream(stream)
