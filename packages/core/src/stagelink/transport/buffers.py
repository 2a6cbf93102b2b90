"""A pool of receive buffers: exact in size, lent until the last view dies, then used again.

A fresh large buffer costs its page faults, several times the copy into it, so a pipeline that
receives the same shapes again and again must reuse memory.

A lease is a ctypes array over the memory; torch's storage keeps it alive, and with it every view,
reinterpretation and autograd graph. Its finalizer may run on any thread, in the middle of garbage
collection, so all it does is to append to a deque.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

_SMALL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Returned:
    memory: torch.Tensor
    size_bytes: int


class BufferPool:
    """A pool of flat uint8 CPU tensors; thread-safe.

    Buffers below 64 KiB are simply allocated: the allocator is faster there than a lease.

    Args:
        idle_bytes: how much returned memory is kept for reuse; beyond it the size that has been
            out of use longest is freed first.
    """

    def __init__(self, idle_bytes: int) -> None:
        self._limit_bytes = idle_bytes
        self._returned: deque[_Returned] = deque()
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._idle_bytes = 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> torch.Tensor:
        """Borrow ``size_bytes`` bytes, aligned to 64; contents are arbitrary.

        The tensor is the borrower's own: nobody writes to it again while it or a view of it lives.
        """
        if size_bytes < _SMALL_BYTES:
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        with self._lock:
            self._collect()
            memory = self._pop(size_bytes)
        if memory is None:
            # Private: a forked data-loader worker that holds a received tensor must not see it
            # rewritten.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = torch.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), dtype=torch.uint8)
        back = partial(self._returned.append, _Returned(memory, size_bytes))
        return lease(memory, size_bytes, back)

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait for reuse."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    def _collect(self) -> None:
        while self._returned:
            back = self._returned.popleft()
            shelf = self._idle.pop(back.size_bytes, [])
            shelf.append(back.memory)
            self._idle[back.size_bytes] = shelf  # the dict's order is the order of last return
            self._idle_bytes += back.size_bytes
        while self._idle_bytes > self._limit_bytes:
            self._pop(next(iter(self._idle)))

    def _pop(self, size_bytes: int) -> torch.Tensor | None:
        shelf = self._idle.get(size_bytes)
        if not shelf:
            return None
        memory = shelf.pop()
        if not shelf:
            del self._idle[size_bytes]
        self._idle_bytes -= size_bytes
        return memory


def lease(memory: torch.Tensor, size_bytes: int, on_return: Callable[[], object]) -> torch.Tensor:
    """Lend the first bytes of memory as a flat uint8 tensor; its storage has exactly that size.

    Args:
        memory: a CPU tensor; it is kept alive.
        size_bytes: at least 1.
        on_return: called when the last view has died, on any thread, in the middle of anything:
            it must take no lock. Not called at exit.
    """
    owner = (ctypes.c_ubyte * size_bytes).from_address(memory.data_ptr())
    end = _End(owner, _on_end)
    end.memory, end.on_return = memory, on_return
    _ends[id(end)] = end
    return torch.frombuffer(owner, dtype=torch.uint8)


class _End(weakref.ref[Any]):
    """What is to be done at the end of a lease; a third of what `weakref.finalize` costs."""

    __slots__ = ("memory", "on_return")
    memory: torch.Tensor
    on_return: Callable[[], object]


def _on_end(end: _End) -> None:
    del _ends[id(end)]
    if not _exiting:
        end.on_return()


_ends: dict[int, _End] = {}
_exiting: list[bool] = []
atexit.register(_exiting.append, True)  # what is on loan stays where it is, till the end
