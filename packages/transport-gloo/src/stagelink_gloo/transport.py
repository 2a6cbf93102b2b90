"""The transport's class: whether gloo can be used here, and one connection per pair of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from stagelink.errors import ConnectError
from stagelink.transport.addresses import is_loopback
from stagelink.transport.contract import API_VERSION, Capabilities, Transport, Verdict
from stagelink.transport.host import server_id
from stagelink.transport.streams import HostStream
from stagelink_gloo.addresses import named_address
from stagelink_gloo.link import IN_FLIGHT, GlooReceiver, GlooSender
from stagelink_gloo.pair import Pair, connect
from stagelink_gloo.staged import StagedReceiver, StagedSender

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagelink.transport.contract import Deadline, Endpoint, Link, Port, Receiver, Sender

__all__ = ["Gloo", "GlooOptions"]


@dataclass(frozen=True, slots=True)
class GlooOptions:
    """Options in ``[transports.gloo]``.

    Attributes:
        interface: name of the network interface to use; None: the one that the environment
            variable ``GLOO_SOCKET_IFNAME`` names, else the address of the control connection with
            the peer, which is loopback within a server.
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
        devices=frozenset({"cpu", "cuda"}), auto_rank=10, in_flight=IN_FLIGHT
    )
    Options: ClassVar[type[Any]] = GlooOptions

    def __init__(self, options: GlooOptions) -> None:
        super().__init__(options)
        self._pairs: dict[int, Pair] = {}

    @classmethod
    def probe(cls, options: GlooOptions) -> Verdict:
        """Usable where torch has gloo and the interface that is named can be used."""
        if not dist.is_available() or not dist.is_gloo_available():
            return Verdict(False, "this build of torch has no gloo")
        try:
            named_address(options.interface)
        except ConnectError as error:
            return Verdict(False, str(error))
        return Verdict(True)

    def describe(self) -> Mapping[str, Any]:
        """This host, and the address that the plan or the environment names, if one does."""
        named = named_address(self.options.interface)
        return {"host": server_id(), "named": None if named is None else list(named)}

    def can_connect(self, link: Link, local: Endpoint, remote: Endpoint) -> Verdict:
        """Refuse two hosts where one of them is to be reached at loopback."""
        del link
        ends = sorted((local, remote), key=attrgetter("rank"))
        if len({end.description.get("host") for end in ends}) == 1:
            return Verdict(True)
        for end in ends:
            address, reason = end.description.get("named") or (None, None)
            if address is not None and is_loopback(address):
                return Verdict(
                    False,
                    f"the other's host cannot reach rank {end.rank} at {address} ({reason}); name "
                    f"another interface, or none: then it is the control connection's address",
                )
        return Verdict(True)

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
    return isinstance(port.stream, HostStream)
