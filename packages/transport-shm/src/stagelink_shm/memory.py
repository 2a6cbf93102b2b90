"""Anonymous shared memory: no name anywhere, gone when nobody maps it."""

from __future__ import annotations

import os

import torch

__all__ = ["mapped", "new_memory"]


def new_memory(capacity_bytes: int) -> int:
    """The descriptor of fresh memory, the caller's to close; its pages are taken when written.

    Raises:
        OSError: the system has none to give.
    """
    import fcntl  # noqa: PLC0415 - Windows has none, and must be able to import this module

    descriptor = os.memfd_create("stagelink", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, capacity_bytes)
        # Nobody can cut it short under the other end, which would end that process.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int) -> torch.Tensor:
    """The memory behind a descriptor, which can be closed then, as a flat uint8 tensor.

    By torch and not by Python's mmap, which keeps a descriptor of its own for each.

    Raises:
        RuntimeError: the descriptor is none of memory, or there is no address space left.
    """
    size = os.fstat(descriptor).st_size
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
