"""Messages that are told apart by group, peer, tag and number; received asked for or not.

A receive that is posted first has the message put into its own tensor; others wait here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from stagelink.control.connection import Frame
from stagelink.control.plane import Plane
from stagelink.errors import ProtocolError
from stagelink.links.arrival import Arrival
from stagelink.links.in_link import InLink
from stagelink.transport.header import Direction, Header, MessageKind

__all__ = ["Address", "Claim", "Mailbox"]

_WORD = 2**32


class Address(NamedTuple):
    """Matching key of a message.

    Attributes:
        group: number of the group, the same on all its ranks; below 2 to the 64th.
        peer: the other rank, by its place in the mesh.
        tag: the caller's.
        number: how many there were before between the two with that tag in that group.
    """

    group: int
    peer: int
    tag: int
    number: int

    def header(self, direction: Direction, like: Header) -> Header:
        """The header of a message to this address; kind, dtype, size and flags as given."""
        return like._replace(
            direction=direction,
            session=self.group // _WORD,
            edge=self.group % _WORD,
            microbatch=self.tag,
            sequence=self.number,
        )

    @classmethod
    def of(cls, peer: int, header: Header) -> Address:
        """Key of a message that a peer sends."""
        group = header.session * _WORD + header.edge
        return cls(group, peer, header.microbatch, header.sequence)


class Claim(Protocol):
    """A posted receive."""

    def meet(self, arrival: Arrival) -> None:
        """The header is here: say where the payload is best put; with a lock held."""

    def take(self, arrival: Arrival) -> None:
        """The message is whole; called once, on whichever thread finished it; never raises."""

    def give_up(self) -> None:
        """The group was destroyed, and the message will not be looked for."""


class Mailbox:
    """Messages that were received, and receives that are posted.

    Args:
        plane: this rank's.
        link_from: the link that a peer's messages come by, opened by asking for it.
    """

    def __init__(self, plane: Plane, link_from: Callable[[int], InLink]) -> None:
        self._plane = plane
        self._link_from = link_from
        self._lock = threading.Lock()
        self._claims: dict[Address, Claim] = {}
        self._here: dict[Address, Arrival] = {}
        self._claimed: dict[Arrival, Claim] = {}
        self._forgotten: set[int] = set()
        for kind in (MessageKind.DATA, MessageKind.REFUSED):
            plane.handle(kind, self._on_message)

    def _on_message(self, peer: int, frame: Frame) -> None:
        arrival = Arrival(frame.header, peer, self._on_settled)
        address = Address.of(peer, frame.header)
        refused = frame.header.kind is MessageKind.REFUSED
        if refused:
            arrival.refusal = frame.note.decode(errors="replace")
        with self._lock:
            claim = self._claims.pop(address, None)
            if claim is None:
                self._keep(address, arrival)
            else:
                claim.meet(arrival)
                self._claimed[arrival] = claim
        if refused or frame.header.inline:
            arrival.payload = frame.payload
            self._on_settled(arrival)
        else:
            self._link_from(peer).announced(arrival, frame.note, frame.take_fds())

    def _keep(self, address: Address, arrival: Arrival) -> None:
        if address in self._here:
            raise ProtocolError(f"two messages of {address}")
        if address.group not in self._forgotten:
            self._here[address] = arrival

    def forget(self, group: int) -> None:
        """A group was destroyed: drop what came and comes for it, and tell those that asked."""
        with self._lock:
            self._forgotten.add(group)
            for address in [address for address in self._here if address.group == group]:
                del self._here[address]
            asked = [address for address in self._claims if address.group == group]
            claims = [self._claims.pop(address) for address in asked]
        for claim in claims:
            claim.give_up()
        self._plane.changed()

    def _on_settled(self, arrival: Arrival) -> None:
        """A message is whole; on whichever thread finished it."""
        with self._lock:
            arrival.settled = True
            claim = self._claimed.pop(arrival, None)
        if claim is not None:
            claim.take(arrival)
            self._plane.changed()

    def awaits(self, address: Address) -> bool:
        """Whether somebody has asked for a message whose header is not here."""
        with self._lock:
            return address in self._claims

    def put(self, address: Address, arrival: Arrival) -> None:
        """A message of this rank to itself."""
        with self._lock:
            claim = self._claims.pop(address, None)
            if claim is None:
                arrival.settled = True
                self._keep(address, arrival)
        if claim is not None:
            claim.take(arrival)
            self._plane.changed()

    def ask(self, address: Address, claim: Claim) -> None:
        """Have ``claim`` take the message, now or when it is whole."""
        with self._lock:
            arrival = self._here.pop(address, None)
            settled = arrival is not None and arrival.settled
            if arrival is None:
                self._claims[address] = claim
            elif not settled:
                self._claimed[arrival] = claim
        if arrival is not None and settled:
            claim.take(arrival)
