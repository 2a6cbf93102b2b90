"""The transport's class: whether gloo can be used here, and one connection per pair of ranks."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from stagelink.transport.contract import API_VERSION, Capabilities, Transport, Verdict
from stagelink.transport.lanes import HostLane
from stagelink_gloo.link import GlooReceiver, GlooSender
from stagelink_gloo.pair import Pair, connect
from stagelink_gloo.staged import StagedReceiver, StagedSender

if TYPE_CHECKING:
    from stagelink.transport.contract import Deadline, Link, Port, Receiver, Sender

__all__ = ["Gloo", "GlooOptions"]


@dataclass(frozen=True, slots=True)
class GlooOptions:
    """Options in ``[transports.gloo]``.

    Attributes:
        interface: name of the network interface to use; None: the one that the host name resolves
            to, or loopback where that is none of this machine's.
    """

    interface: str | None = None


class Gloo(Transport):
    """Tensors over TCP, by a process group of its own for each pair of ranks.

    The default process group is neither used nor needed. CUDA tensors go by way of pinned memory;
    that has been run on a double, and on no GPU yet.
    """

    name: ClassVar[str] = "gloo"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu", "cuda"}), auto_rank=10, in_flight=4
    )
    Options: ClassVar[type[Any]] = GlooOptions

    def __init__(self, options: GlooOptions) -> None:
        super().__init__(options)
        self._pairs: dict[int, Pair] = {}

    @classmethod
    def probe(cls, options: GlooOptions) -> Verdict:
        """Usable where torch has gloo and the interface that the options name exists."""
        if not dist.is_available() or not dist.is_gloo_available():
            return Verdict(False, "this build of torch has no gloo")
        known = [name for _, name in socket.if_nameindex()]
        if options.interface is None or options.interface in known:
            return Verdict(True)
        here = ", ".join(map(repr, known))
        return Verdict(False, f"no network interface {options.interface!r} here, only {here}")

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Open the sending end; the first end of a pair of ranks waits for the peer's.

        Raises:
            TimeoutError: the peer did not come before the deadline.
            ConnectionError: it came, and could not be reached.
        """
        del link
        pair = self._pair(port, deadline)
        return GlooSender(pair, port) if _on_host(port) else StagedSender(pair, port)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Open the receiving end; as `open_sender`."""
        del link
        pair = self._pair(port, deadline)
        return GlooReceiver(pair, port) if _on_host(port) else StagedReceiver(pair, port)

    def _pair(self, port: Port, deadline: Deadline) -> Pair:
        # No lock: all that is opened for one peer is opened on one thread.
        if port.peer not in self._pairs:
            self._pairs[port.peer] = connect(port, self.options.interface, deadline)
        return self._pairs[port.peer]

    def close(self, deadline: Deadline) -> None:
        """Close the connections; both directions of a pair share one, so no link does it alone."""
        while self._pairs:
            self._pairs.popitem()[1].close(deadline)


def _on_host(port: Port) -> bool:
    return isinstance(port.lane, HostLane)
