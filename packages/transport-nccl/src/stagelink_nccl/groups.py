"""Groups of two ranks by NCCL: one for each direction of a pair, made with its first operation.

No GPU has run this module yet.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist

from stagelink.transport.contract import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagelink.transport.contract import Deadline, Port

__all__ = [
    "Group",
    "Groups",
    "NcclGroups",
    "NcclOptions",
    "PairGroup",
    "Work",
]

_NEVER = timedelta(days=365)
"""Deadlines are the transport's own: NCCL's watchdog ends the process where one passes."""

_ABORT = timedelta(seconds=10)

_MULTI_RANK_SINCE = (2, 30, 0)
_MULTI_RANK_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True, slots=True)
class NcclOptions:
    """Options in ``[transports.nccl]``; both ends of a link must have the same.

    Attributes:
        operation: what moves a message.
        min_ctas: the fewest blocks of threads that NCCL may use for one; 0: as NCCL likes.
        max_ctas: the most; 0: as NCCL likes.
        eager: connect as soon as both ends of a link are open, and not with its first message.

    Raises:
        ValueError: the limits contradict each other.
    """

    operation: Literal["broadcast", "send_recv"] = "broadcast"
    min_ctas: int = 0
    max_ctas: int = 0
    eager: bool = False

    def __post_init__(self) -> None:
        if min(self.min_ctas, self.max_ctas) < 0:
            raise ValueError("min_ctas and max_ctas are numbers of blocks, or 0 for NCCL's own")
        if self.max_ctas and self.min_ctas > self.max_ctas:
            raise ValueError(f"min_ctas = {self.min_ctas} is above max_ctas = {self.max_ctas}")


class Work(Protocol):
    """One operation in flight, as torch has it."""

    def is_completed(self) -> bool:
        """Whether it is done or has failed; never blocks."""

    def wait(self, timeout: timedelta) -> object:
        """Raise what went wrong, once it is completed. Without a time NCCL's would not."""


class Group(ABC):
    """Two ranks, and operations from the first to the second. Used by the issuing thread only."""

    @abstractmethod
    def start(self, buffer: torch.Tensor) -> Work:
        """Queue one operation: the first rank's buffer into the second's; both of one size."""

    @abstractmethod
    def close(self, *, broken: bool) -> None:
        """Give it back.

        Args:
            broken: an operation may be in flight whose other rank never comes.
        """


class Groups(ABC):
    """The source of groups. What the tests put in its place runs without a GPU."""

    @abstractmethod
    def probe(self) -> Verdict:
        """Whether there can be any in this process."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Describe this rank to the other: ``version``, and the device's ``uuid``.

        ``shares_device`` is true where two ranks may be on one device.
        """

    @abstractmethod
    def connect(self, port: Port, options: NcclOptions, deadline: Deadline) -> Group:
        """The group of a link, of which this is one end; may block until the other comes."""


class PairGroup(Group):
    """A group of two by one of torch's backends.

    Args:
        backend: of two ranks, the sender is 0.
        sends: whether this is the sender.
        options: broadcast, or send and receive.
    """

    def __init__(self, backend: Any, options: NcclOptions, *, sends: bool) -> None:
        self._backend = backend
        self._sends = sends
        self._broadcasts = options.operation == "broadcast"

    def start(self, buffer: torch.Tensor) -> Work:
        """See `Group.start`."""
        work: Work
        if self._broadcasts:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.asyncOp = True  # else it would be put on the current stream itself
            work = self._backend.broadcast([buffer], options)
        elif self._sends:
            work = self._backend.send([buffer], 1, 0)
        else:
            work = self._backend.recv([buffer], 0, 0)
        return work

    def close(self, *, broken: bool) -> None:
        """Abort the communicator where it may be stuck; its other rank does the same."""
        if broken:
            # It waits for its own thread at most as long as an operation may take.
            self._backend._set_default_timeout(_ABORT)
            self._backend.abort()
        else:
            self._backend.shutdown()


class NcclGroups(Groups):
    """Groups by NCCL, on the current device."""

    def probe(self) -> Verdict:
        """Whether torch has NCCL and there is a GPU."""
        if not dist.is_available() or not dist.is_nccl_available():
            return Verdict(False, "this build of torch has no NCCL")
        if not torch.cuda.is_available():
            return Verdict(False, "no CUDA device, or no driver for it")
        return Verdict(
            True,
            "where the program uses NCCL itself as well, set NCCL_LAUNCH_ORDER_IMPLICIT=1",
        )

    def describe(self) -> Mapping[str, Any]:
        """Version of NCCL, and which GPU."""
        device = torch.cuda.current_device()
        version = tuple(torch.cuda.nccl.version())
        shares = version >= _MULTI_RANK_SINCE and os.environ.get(_MULTI_RANK_VARIABLE) == "1"
        return {
            "version": list(version),
            "uuid": str(torch.cuda.get_device_properties(device).uuid),
            "shares_device": shares,
        }

    def connect(self, port: Port, options: NcclOptions, deadline: Deadline) -> Group:
        """Needs no peer: NCCL connects with the first operation, by a key in the store."""
        nccl: Any = dist.ProcessGroupNCCL
        given = nccl.Options()
        given._timeout = _NEVER
        if options.min_ctas:
            given.config.min_ctas = options.min_ctas
        if options.max_ctas:
            given.config.max_ctas = options.max_ctas
        sends = port.rank == port.link.source
        store = dist.PrefixStore(f"from {port.link.source}", port.store())
        # Where the other dies in the meantime, the key never comes.
        store.set_timeout(timedelta(seconds=max(deadline.remaining_s, 1.0)))
        return PairGroup(nccl(store, int(not sends), 2, given), options, sends=sends)
