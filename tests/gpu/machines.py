"""What the points run on: a GPU, or in the ordinary tests its double."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from stagelink_cupy import Cupy

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stagelink.transport.contract import Transport

__all__ = ["GpuMachine", "Machine"]

_KIB, _MIB = 1024, 1024 * 1024
_CYCLES_PER_S = 2_000_000_000
"""More than any GPU's clock has, so that what is to last a second lasts at least one."""


class Machine(ABC):
    """A GPU as two processes use it; can be pickled.

    Attributes:
        device: kind of the stages' device.
        cupy: name of the transport over CUDA IPC.
        nccl: name of the one over NCCL.
        orders: who is to order the copies of cupy, one after the other.
        transports: classes to register in code.
        collectives: torch's name of the backend that stands for NCCL.
        hold_s: how long a held stream stays so at least.
        long_s: the same, where nobody is to wait for its end.
        settle_s: how long to look whether something happens after all.
        patience_s: how long a rank may take for one program.
        elements: of messages, int32, that take more than one piece.
        large_bytes: of a message that is cut into many pieces.
        sizes_bytes: of messages that are timed.
        rounds: how often each is.
    """

    device: ClassVar[str]
    cupy: ClassVar[str] = "cupy"
    nccl: ClassVar[str] = "nccl"
    orders: Sequence[str] = ("host", "device")
    transports: ClassVar[tuple[type[Transport], ...]] = ()
    collectives: ClassVar[str] = "nccl"
    hold_s: ClassVar[float] = 1.0
    long_s: ClassVar[float] = 20.0
    settle_s: ClassVar[float] = 2.0
    patience_s: ClassVar[float] = 20.0
    elements: ClassVar[int] = 700_000
    large_bytes: ClassVar[int] = 100_000_000
    sizes_bytes: ClassVar[tuple[int, ...]] = (64 * _KIB, *(_MIB * size for size in (1, 4, 16, 64)))
    rounds: ClassVar[int] = 7

    @abstractmethod
    def process(self, rank: int) -> AbstractContextManager[Any]:
        """Make this process a user of the GPU; gives the module with CUDA's functions."""

    @abstractmethod
    def hold(self, rt: Any, stream: int, seconds: float) -> None:
        """What is queued on a stream from now on does not begin so long, or until `release`."""

    @abstractmethod
    def release(self, rt: Any, stream: int) -> None:
        """A held stream may go on, where the machine can be told; else it goes on by itself."""

    @abstractmethod
    def linger(self) -> None:
        """Queue work on the current stream that takes a while."""

    @abstractmethod
    def side_stream(self) -> AbstractContextManager[object]:
        """Another stream is the current one."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the current stream."""

    @abstractmethod
    def allocator(self) -> str:
        """Which of torch's allocators is in use."""

    @abstractmethod
    def nccl_version(self) -> tuple[int, ...] | None:
        """Of the NCCL in this torch; None where it has none."""

    def computes(self) -> bool:
        """Whether torch can compute on it."""
        return bool(torch.ones(1000, device=self.device).mul(2).sum().item() == 2000)


class GpuMachine(Machine):
    """The first GPU that this process sees, through CuPy and torch."""

    device = "cuda"

    @contextmanager
    def process(self, rank: int) -> Iterator[Any]:
        del rank
        torch.cuda.set_device(0)
        torch.cuda._sleep(1)  # it is loaded now, and not while a stream is held
        torch.cuda.synchronize()
        rt = Cupy.runtime()
        rt.setDevice(0)
        yield rt

    def hold(self, rt: Any, stream: int, seconds: float) -> None:
        del rt
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=0)):
            torch.cuda._sleep(int(seconds * _CYCLES_PER_S))

    def release(self, rt: Any, stream: int) -> None:
        """It cannot be told."""

    def linger(self) -> None:
        torch.cuda._sleep(_CYCLES_PER_S // 20)

    def side_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream())

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()

    def allocator(self) -> str:
        backend = str(torch.cuda.get_allocator_backend())
        if backend != "native":  # others have no segments to show
            return backend
        segments = torch.cuda.memory_snapshot()
        expandable = any(segment.get("is_expandable") for segment in segments)
        return "expandable segments" if expandable else backend

    def nccl_version(self) -> tuple[int, ...] | None:
        if not torch.distributed.is_nccl_available():
            return None
        return tuple(torch.cuda.nccl.version())[:3]
