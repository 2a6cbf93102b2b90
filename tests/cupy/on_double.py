"""transport-cupy on the double: tensors of the CPU play those of a GPU."""

from __future__ import annotations

import gc
import time
import weakref
from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from stagelink.transport.streams import Stream, StreamEvent
from stagelink_cupy import Cupy
from tests.cupy.double import CudaDouble
from tests.cupy.machine import DoubleConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from stagelink.transport.contract import Link

__all__ = ["CupyOnDouble", "DoubleStream", "on_device"]

NOT_WRITTEN = 0xA5
_PATIENCE_S = 15.0


class DoubleMoment(StreamEvent):
    """An event of the double."""

    def __init__(self, rt: CudaDouble, device: int, stream: int) -> None:
        self._rt = rt
        with _current(rt, device):
            self._event = rt.eventCreateWithFlags(rt.eventDisableTiming)
        rt.eventRecord(self._event, stream)
        weakref.finalize(self, _destroy, rt, self._event).atexit = False

    @property
    def reached(self) -> bool:
        status = self._rt.eventQuery(self._event)
        if status not in (0, 600):
            raise self._rt.CUDARuntimeError(status)
        return status == 0


def _destroy(rt: CudaDouble, event: int) -> None:
    with suppress(RuntimeError):  # the double is closed, or has failed
        rt.eventDestroy(event)


@contextmanager
def _current(rt: CudaDouble, device: int) -> Iterator[None]:
    before = rt.getDevice()
    rt.setDevice(device)
    yield
    rt.setDevice(before)


class DoubleStream(Stream):
    """A stream of the double. The caller's stream is the host: whatever it called is done.

    Which GPU is current for the double it leaves as it is: torch and CuPy need not agree on that.
    """

    device = torch.device("cpu")
    streams: ClassVar[defaultdict[tuple[CudaDouble, int], list[int]]] = defaultdict(list)

    def __init__(self, rt: CudaDouble, device: int = 0) -> None:
        self._rt = rt
        self._device = device
        free = self.streams[rt, device]  # kept for the next stream, as torch keeps them
        if not free:
            gc.collect()  # what only a reference cycle holds is not in use
        with _current(rt, device):
            self.handle = free.pop() if free else rt.streamCreateWithFlags(rt.streamNonBlocking)
        weakref.finalize(self, free.append, self.handle).atexit = False

    def record_caller(self) -> None:
        """Everything is done."""

    def record(self) -> StreamEvent:
        return DoubleMoment(self._rt, self._device, self.handle)

    def entered(self, after: StreamEvent | None = None) -> AbstractContextManager[None]:
        assert after is None
        return nullcontext()

    def buffer(self, size_bytes: int) -> torch.Tensor:
        # No old payload that may lie there is taken for a new one.
        return torch.full((size_bytes,), NOT_WRITTEN, dtype=torch.uint8)

    def staging(self, size_bytes: int) -> torch.Tensor:
        return self.buffer(size_bytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        addresses = target.data_ptr(), source.data_ptr()
        self._rt.memcpyAsync(*addresses, source.numel(), self._rt.memcpyDefault, self.handle)

    def cloned(self, payload: torch.Tensor) -> torch.Tensor:
        return payload.clone()

    def hand_to_caller(self, payload: torch.Tensor, moment: StreamEvent) -> None:
        began = time.monotonic()
        while not moment.reached:
            assert time.monotonic() - began < _PATIENCE_S
            time.sleep(0.0001)


class CupyOnDouble(Cupy):
    """Cupy, where this process's double is CUDA.

    Attributes:
        rt: the double; see `on_device`.
        number: of the GPU that is current for torch.
    """

    name = "cupy-on-double"
    # Made when this is imported, so that no test is blamed for what it holds.
    rt: ClassVar[CudaDouble] = CudaDouble(DoubleConfig())
    number: ClassVar[int] = 0
    capabilities = replace(Cupy.capabilities, devices=frozenset({"cpu"}))

    @classmethod
    def runtime(cls) -> Any:
        return cls.rt

    @classmethod
    def device(cls) -> int:
        return cls.number

    def stream(self, link: Link) -> Stream:
        return DoubleStream(self.rt, self.number)


@contextmanager
def on_device(config: DoubleConfig, rank: int, number: int = 0) -> Iterator[CudaDouble]:
    """A double of its own for what this process does meanwhile, and one of its GPUs."""
    with pytest.MonkeyPatch.context() as patch, CudaDouble(config, rank) as rt:
        patch.setattr(CupyOnDouble, "rt", rt)
        patch.setattr(CupyOnDouble, "number", number)
        yield rt
        DoubleStream.streams.pop((rt, number), None)
