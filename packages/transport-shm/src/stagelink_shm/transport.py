"""The transport's class: whether this machine has shared memory without names."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from stagelink.transport.contract import (
    API_VERSION,
    Capabilities,
    Footprint,
    Transport,
    Verdict,
)
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.slots import SlotRing
from stagelink_shm.memory import mapped, new_memory
from stagelink_shm.receiver import ShmReceiver
from stagelink_shm.sender import SPARE_SLOTS, SharedMemory, ShmSender

if TYPE_CHECKING:
    from stagelink.transport.contract import Deadline, Link, Port, Receiver, Sender

__all__ = ["Shm", "ShmOptions"]

_M = TypeVar("_M")

_LEAST_BYTES = 256 * 1024
_MOST_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ShmOptions:
    """Options in ``[transports.shm]``.

    Attributes:
        link_bytes: the most memory that the slots of one direction of a link take, at least
            256 KiB. It is taken as it is needed. An eighth of it is the largest slot; a larger
            message goes in pieces, and is copied twice more, also with ``copy=False``, into
            memory of the processes' own.

    Raises:
        ValueError: it is too little, or no size.
    """

    link_bytes: int = 1024**3

    def __post_init__(self) -> None:
        if self.link_bytes < _LEAST_BYTES:
            raise ValueError(
                f"link_bytes = {self.link_bytes}; a link takes at least {_LEAST_BYTES} bytes"
            )
        if self.link_bytes > _MOST_BYTES:
            raise ValueError(f"link_bytes = {self.link_bytes}; the most is {_MOST_BYTES}")


class Shm(Transport):
    """CPU tensors within a server: copied once, into memory that both processes see."""

    name: ClassVar[str] = "shm"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu"}),
        auto_rank=20,
        same_server=True,
        in_flight=4,
        copies_on_begin=True,
    )
    Options: ClassVar[type[Any]] = ShmOptions

    @classmethod
    def probe(cls, options: ShmOptions) -> Verdict:
        """Usable on Linux, where memory needs no name and descriptors can be handed over."""
        del options
        if sys.platform != "linux":
            return Verdict(False, f"it needs Linux's memfd, this is {sys.platform}")
        try:
            descriptor = new_memory(mmap.PAGESIZE)
            try:
                mapped(descriptor)
            finally:
                os.close(descriptor)
        except (OSError, RuntimeError) as error:
            if stops_caller(error):
                raise
            return Verdict(False, f"no shared memory without a name: {error}")
        return Verdict(True)

    def footprint(self, window: int, message_bytes: int | None) -> Footprint:
        """Count as many slots as the windows ask for, each made for the largest message."""
        ring = self._ring(window, int)
        bound: int = self.options.link_bytes
        return Footprint(
            ring.most, bound if message_bytes is None else ring.most_bytes(message_bytes)
        )

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Needs no peer: slots are made when they are needed."""
        del link, deadline
        return ShmSender(port, self._ring(port.window, SharedMemory))

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Needs no peer."""
        del link, deadline
        return ShmReceiver(port)

    def _ring(self, window: int, make: Callable[[int], _M]) -> SlotRing[_M]:
        return SlotRing(make, most=window + SPARE_SLOTS, bound_bytes=self.options.link_bytes)
