"""Device memory of the double: anonymous shared memory that another process maps by its handle.

Every address stays taken until the double is closed, also of memory that is freed or closed: so
nothing else ever comes to lie there, and a copy that is too late is known by its addresses.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from stagelink_shm.memory import mapped, new_memory
from tests.cupy.codes import CUDARuntimeError, Status

if TYPE_CHECKING:
    from tests.cupy.machine import Gpu

__all__ = ["POISON", "DeviceMemory", "Handle", "open_exported"]

POISON = 0xDD
"""What freed memory is filled with, for those who still look at it."""

HANDLE_BYTES = 64
_HEAD_BYTES = 4096
"""In front of a region's data: a page that begins with its token."""

_LOOKS, _LOOK_S = 50, 0.005
"""How often to look for importers, and how long to wait in between."""

_TOKEN = struct.Struct("=Q")
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000  # as Linux numbers them

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)


class Handle(NamedTuple):
    """What travels in CUDA's 64 bytes: where in which process, and of which GPU.

    Attributes:
        kind: ``b"memory"`` or ``b"event"``.
        pid: the process that made it.
        descriptor: of that process, for shared memory.
        place: the bytes of a region, or the number of an event within the shared memory.
        token: stands in the shared memory as long as what is meant is there.
        uuid: the GPU's.
    """

    kind: bytes
    pid: int
    descriptor: int
    place: int
    token: int
    uuid: bytes

    def pack(self) -> bytes:
        return _HANDLE.pack(*self)

    @classmethod
    def unpack(cls, handle: Any, kind: bytes) -> Handle:
        """The other way; refuses what CuPy and CUDA refuse."""
        if not isinstance(handle, bytes):
            kind_seen = type(handle).__name__
            raise TypeError(f"handle has incorrect type (expected bytes, got {kind_seen})")
        if len(handle) != HANDLE_BYTES:
            raise IndexError(f"{len(handle)} values during array assignment, expected 64")
        found = cls(*_HANDLE.unpack(handle))
        found = found._replace(kind=found.kind.rstrip(b"\0"))
        if found.kind != kind:
            raise CUDARuntimeError(Status.cudaErrorInvalidResourceHandle)
        if found.pid == os.getpid():
            raise CUDARuntimeError(Status.cudaErrorDeviceUninitialized)
        return found


_HANDLE = struct.Struct("=8sIiQQ16s16x")


def open_exported(handle: Handle) -> int:
    """A descriptor of the memory that a handle leads to.

    Raises:
        CUDARuntimeError: it leads nowhere, for one because its process is dead.
    """
    try:
        return os.open(f"/proc/{handle.pid}/fd/{handle.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CUDARuntimeError(Status.cudaErrorMapBufferObjectFailed) from error


class Region:
    """One allocation, made here or opened from another process.

    Args:
        descriptor: of its memory; the region's from now on.
        size_bytes: of its data.
        gpu: where it lies.
        token: of its handle.

    Attributes:
        address: of its data, in this process.
        opens: how often it is open here; 0 where it was made here.
        alive: it is neither freed nor closed.
        exported: somebody asked for its handle.
    """

    def __init__(self, descriptor: int, size_bytes: int, gpu: Gpu, token: int) -> None:
        self._bytes = mapped(descriptor)
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self.gpu = gpu
        self.token = token
        self.address = self._bytes.data_ptr() + _HEAD_BYTES
        self.opens = 0
        self.alive = True
        self.exported = False

    def overlaps(self, address: int, size_bytes: int) -> bool:
        return address < self.address + self.size_bytes and self.address < address + size_bytes

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.size_bytes

    def poison(self) -> None:
        self._bytes.fill_(POISON)

    def retire(self) -> None:
        """Let go of the memory, not of the addresses: to touch one now is to crash."""
        begin, size = self._bytes.data_ptr(), self._bytes.numel()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        _LIBC.mmap(begin, size, _PROT_NONE, flags, -1, 0)
        self.close()

    def close(self) -> None:
        if self.alive:
            self.alive = False
            os.close(self.descriptor)


class DeviceMemory:
    """All that one process has allocated or opened.

    Args:
        undefined: told in a sentence of what CUDA leaves undefined.

    Attributes:
        lock: held while bytes are moved, so that none of them goes meanwhile.
    """

    def __init__(self, undefined: list[str]) -> None:
        self.lock = threading.RLock()
        self._regions: list[Region] = []
        self._undefined = undefined

    def used_bytes(self, gpu: Gpu) -> int:
        with self.lock:
            own = [region for region in self._regions if region.alive and not region.opens]
            return sum(region.size_bytes for region in own if region.gpu == gpu)

    def allocate(self, size_bytes: int, gpu: Gpu) -> int:
        token = secrets.randbits(63) + 1
        try:
            descriptor = new_memory(_HEAD_BYTES + size_bytes)
        except OSError as error:
            raise CUDARuntimeError(Status.cudaErrorMemoryAllocation) from error
        os.pwrite(descriptor, _TOKEN.pack(token), 0)
        with self.lock:
            self._regions.append(Region(descriptor, size_bytes, gpu, token))
            return self._regions[-1].address

    def release(self, pointer: int) -> None:
        """Free an allocation, and spoil it for a process that has it open still."""
        with self.lock:
            region = self._exactly(pointer, opened=False)
            if region.exported:
                self._look_for_importers(region)
                region.poison()
            region.retire()

    def _look_for_importers(self, region: Region) -> None:
        # Each holds a lock on the memory, which the kernel takes off a process that is killed, be
        # it a moment after others have learnt of its end.
        for _ in range(_LOOKS):
            with suppress(BlockingIOError):
                fcntl.flock(region.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(_LOOK_S)
        self._undefined.append(f"free({region.address:#x}) of memory that is open elsewhere")

    def export(self, pointer: int) -> bytes:
        """The handle of the allocation that the pointer points into."""
        with self.lock:
            for region in self._regions:
                if region.alive and not region.opens and region.holds(pointer):
                    region.exported = True
                    return Handle(
                        *(b"memory", os.getpid(), region.descriptor, region.size_bytes),
                        *(region.token, region.gpu.uuid),
                    ).pack()
        raise CUDARuntimeError(Status.cudaErrorInvalidValue)

    def open(self, handle: Handle, gpu: Gpu) -> int:
        """Map an allocation of another process, once; later opens count."""
        with self.lock:
            for region in self._regions:
                if region.alive and (region.token, region.gpu) == (handle.token, gpu):
                    region.opens += 1
                    return region.address
            self._regions.append(self._opened(handle, gpu))
            return self._regions[-1].address

    @staticmethod
    def _opened(handle: Handle, gpu: Gpu) -> Region:
        descriptor = open_exported(handle)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.pread(descriptor, _TOKEN.size, 0) != _TOKEN.pack(handle.token):
                raise ProcessLookupError("the memory was freed, and its descriptor taken again")
            region = Region(descriptor, handle.place, gpu, handle.token)
        except (OSError, RuntimeError) as error:
            os.close(descriptor)
            raise CUDARuntimeError(Status.cudaErrorMapBufferObjectFailed) from error
        region.opens = 1
        return region

    def close_opened(self, pointer: int) -> None:
        with self.lock:
            region = self._exactly(pointer, opened=True)
            if region.opens == 1:
                region.retire()  # it keeps its count, by which it is none of this process's own
            else:
                region.opens -= 1

    def _exactly(self, pointer: int, *, opened: bool) -> Region:
        for region in self._regions:
            if region.alive and region.address == pointer and bool(region.opens) == opened:
                return region
        raise CUDARuntimeError(Status.cudaErrorInvalidValue)

    def check(self, address: int, size_bytes: int) -> None:
        """What CUDA sees when it is called: no null, nothing past the end of an allocation."""
        with self.lock:
            for region in self._regions:
                end = region.address + region.size_bytes
                if region.alive and region.holds(address) and address + size_bytes > end:
                    raise CUDARuntimeError(Status.cudaErrorInvalidValue)
        if size_bytes and not address:
            raise CUDARuntimeError(Status.cudaErrorInvalidValue)

    def gone(self, address: int, size_bytes: int) -> bool:
        """Whether some of it was freed or closed."""
        with self.lock:
            return any(
                not region.alive and region.overlaps(address, size_bytes)
                for region in self._regions
            )

    def close(self) -> None:
        """Give back all memory and all addresses; nothing may be under way."""
        with self.lock:
            for region in self._regions:
                region.close()
            self._regions.clear()
