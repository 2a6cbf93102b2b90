"""A double of the functions of `cupy.cuda.runtime`, for machines without a GPU.

An object of it stands for the module. Its names, arguments and constants are CuPy's, which
test_contract.py checks; what is its own is in `tests.cupy.device.OWN`. What CUDA leaves to chance
is drawn from a seed, and what it leaves undefined is written to `CudaDouble.undefined`.

Pointers are addresses of this process, so that a tensor on the CPU can play one on the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.cupy.codes import CUDARuntimeError, Status
from tests.cupy.device import call
from tests.cupy.memory import DeviceMemory, Handle
from tests.cupy.queues import Queues

if TYPE_CHECKING:
    from tests.cupy.machine import DoubleConfig, Gpu

__all__ = ["CudaDouble"]


class CudaDouble(Queues):
    """CUDA as one process sees it. A context manager; threads and memory end with `close`.

    Stream 0 is a stream like others, one per GPU: it waits for none and none waits for it.

    Args:
        config: of this double.
        place: of this process; its rank for one: processes are delayed differently.

    Attributes:
        undefined: sentences on what was done that CUDA gives no promise about.
    """

    memcpyHostToDevice = 1
    memcpyDeviceToHost = 2
    memcpyDeviceToDevice = 3
    memcpyDefault = 4
    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self, config: DoubleConfig, place: int = 0) -> None:
        super().__init__(config, place)
        self._memory = DeviceMemory(self.undefined)

    def _give_back(self) -> None:
        self._memory.close()
        super()._give_back()

    # -- memory

    @call
    def malloc(self, size: int) -> int:
        gpu = self._gpu(self._ordinal)
        if self._memory.used_bytes(gpu) + size > gpu.memory_bytes:
            raise CUDARuntimeError(Status.cudaErrorMemoryAllocation)
        return self._memory.allocate(size, gpu) if size else 0

    @call
    def free(self, ptr: int) -> None:
        if ptr:
            self._drain()
            self._memory.release(ptr)

    @call
    def memGetInfo(self) -> tuple[int, int]:
        gpu = self._gpu(self._ordinal)
        return gpu.memory_bytes - self._memory.used_bytes(gpu), gpu.memory_bytes

    @call
    def memcpy(self, dst: int, src: int, size: int, kind: int) -> None:
        self._copy(dst, src, size, kind, 0)
        # Between two places of the GPU, CUDA's call does not wait either.
        if kind != self.memcpyDeviceToDevice:
            self._progress.must(self._stream(0).until_now())

    @call
    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._copy(dst, src, size, kind, stream)

    def _copy(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        if not 0 <= kind <= self.memcpyDefault:
            raise CUDARuntimeError(Status.cudaErrorInvalidValue)
        self._memory.check(src, size)
        self._touch(dst, size, stream, lambda: ctypes.memmove(dst, src, size), (dst, src))

    @call
    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        self._touch(ptr, size, stream, lambda: ctypes.memset(ptr, value, size), (ptr,))

    def _touch(
        self,
        pointer: int,
        size: int,
        stream: int,
        move: Callable[[], object],
        addresses: tuple[int, ...],
    ) -> None:
        self._memory.check(pointer, size)

        def act() -> None:
            with self._memory.lock:
                if any(self._memory.gone(address, size) for address in addresses):
                    self._progress.fail(Status.cudaErrorIllegalAddress)
                else:
                    move()

        self._stream(stream).push(act=act)

    # -- memory of other processes

    @call
    def ipcGetMemHandle(self, devPtr: int) -> bytes:
        return self._memory.export(devPtr)

    @call
    def ipcOpenMemHandle(self, handle: bytes, flags: int = cudaIpcMemLazyEnablePeerAccess) -> int:
        found, gpu = Handle.unpack(handle, b"memory"), self._gpu(self._ordinal)
        if flags != self.cudaIpcMemLazyEnablePeerAccess:
            raise CUDARuntimeError(Status.cudaErrorInvalidValue)
        self._must_reach(gpu, found.uuid)
        return self._memory.open(found, gpu)

    @call
    def ipcCloseMemHandle(self, devPtr: int) -> None:
        self._drain()
        self._memory.close_opened(devPtr)

    def _must_reach(self, gpu: Gpu, uuid: bytes) -> None:
        if (gpu.uuid, uuid) in {(one.uuid, other.uuid) for one, other in self.config.denied}:
            raise CUDARuntimeError(Status.cudaErrorPeerAccessUnsupported)
