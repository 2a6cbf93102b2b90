"""The transport's class: its options, and the streams of each link."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from stagelink.errors import ConnectError
from stagelink.transport.addresses import Address, address_of, is_loopback
from stagelink.transport.board import Board
from stagelink.transport.contract import API_VERSION, Capabilities, Transport, Verdict
from stagelink.transport.host import server_id
from stagelink_tcp.flow import Flow
from stagelink_tcp.joining import Door, dial, welcome
from stagelink_tcp.link import TcpReceiver, TcpSender

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagelink.transport.contract import Deadline, Endpoint, Link, Port, Receiver, Sender

__all__ = ["Tcp", "TcpOptions"]

_INTERFACE = "[transports.tcp] interface"
_MOST_STREAMS = 64
_MOST_PORT = 65535


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """Options in ``[transports.tcp]``.

    Attributes:
        interface: name of the network interface to use; None: the address of the control
            connection with the peer, which is loopback within a server.
        ports: the first and the last port that a rank may listen at, of which it takes the first
            that is free, for all its peers; None: any.
        streams: connections for each direction of a link, 1 to 64, over which a message of a MiB
            and more is divided.

    Raises:
        ValueError: the ports are no range, or the streams too many or none.
    """

    interface: str | None = None
    ports: tuple[int, int] | None = None
    streams: int = 1

    def __post_init__(self) -> None:
        if self.ports is not None and not 1 <= self.ports[0] <= self.ports[1] <= _MOST_PORT:
            raise ValueError(
                f"ports = {list(self.ports)}: must be the first and the last port, as "
                "[20000, 20100]"
            )
        if not 1 <= self.streams <= _MOST_STREAMS:
            raise ValueError(f"streams = {self.streams}; a link takes 1 to {_MOST_STREAMS}")


class Tcp(Transport):
    """CPU tensors over TCP, from a tensor's memory to the buffer that it is received in."""

    name: ClassVar[str] = "tcp"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(devices=frozenset({"cpu"}), auto_rank=12)
    Options: ClassVar[type[Any]] = TcpOptions

    def __init__(self, options: TcpOptions) -> None:
        super().__init__(options)
        self._door = Door(options.ports)

    @classmethod
    def probe(cls, options: TcpOptions) -> Verdict:
        """Usable where the interface that is named can be used."""
        try:
            _named_address(options)
        except ConnectError as error:
            return Verdict(False, str(error))
        return Verdict(True)

    def describe(self) -> Mapping[str, Any]:
        """This host, and the address that the plan names, if it does."""
        named = _named_address(self.options)
        return {"host": server_id(), "named": None if named is None else named.text}

    def can_connect(self, link: Link, local: Endpoint, remote: Endpoint) -> Verdict:
        """Refuse two hosts where one of them is to be reached at loopback."""
        del link
        ends = sorted((local, remote), key=attrgetter("rank"))
        if len({end.description.get("host") for end in ends}) == 1:
            return Verdict(True)
        for end in ends:
            address = end.description.get("named")
            if address is not None and is_loopback(address):
                return Verdict(
                    False,
                    f"the other's host cannot reach rank {end.rank} at {address} ({_INTERFACE}); "
                    "name another interface, or none: then it is the control connection's address",
                )
        return Verdict(True)

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Open the sending end; waits for the peer's.

        Raises:
            TimeoutError: the peer did not come before the deadline.
            ConnectError: it cannot be reached, or here no port is free.
        """
        return TcpSender(self._flows(link, port, deadline))

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Open the receiving end; as `open_sender`."""
        return TcpReceiver(self._flows(link, port, deadline))

    def _flows(self, link: Link, port: Port, deadline: Deadline) -> list[Flow]:
        streams: int = self.options.streams
        own = Address(port.address, "as the control connection's")
        mine = _named_address(self.options) or own
        board = Board(port, deadline, f"{link.source}-{link.target}/")
        if port.rank > port.peer:
            socks = welcome(self._door, board, port, mine, streams)
        else:
            socks = dial(board, port, mine, streams)
        sends = port.rank == link.source
        return [Flow(port, sock, sends=sends) for sock in socks]


def _named_address(options: TcpOptions) -> Address | None:
    """The address of the interface that the option names; None: it names none.

    Raises:
        ConnectError: the interface cannot be used.
    """
    return None if options.interface is None else address_of(options.interface, _INTERFACE)
