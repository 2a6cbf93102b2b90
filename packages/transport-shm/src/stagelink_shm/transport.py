"""The transport's class: whether this machine has shared memory without names."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from stagelink.transport.contract import API_VERSION, Capabilities, Transport, Verdict

if TYPE_CHECKING:
    from stagelink.transport.contract import Deadline, Link, Port, Receiver, Sender

__all__ = ["Shm", "ShmOptions"]


@dataclass(frozen=True, slots=True)
class ShmOptions:
    """Options in ``[transports.shm]``.

    Attributes:
        link_bytes: the most memory that the slots of one link take; an eighth of it is the
            largest slot, and larger messages go in pieces.
    """

    link_bytes: int = 1024**3


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
            os.close(os.memfd_create("stagelink-probe"))
        except OSError as error:
            return Verdict(False, f"no shared memory without a name: {error.strerror}")
        return Verdict(True)

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Needs no peer: slots are made when they are needed."""
        del link, deadline
        from stagelink_shm.sender import ShmSender  # noqa: PLC0415 - needs Linux

        return ShmSender(port, self.options.link_bytes)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Needs no peer."""
        del link, deadline
        from stagelink_shm.receiver import ShmReceiver  # noqa: PLC0415 - needs Linux

        return ShmReceiver(port)
