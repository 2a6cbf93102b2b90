"""What has arrived and has not been asked for yet, by key.

A message is found by (session, edge, direction, microbatch) and by nothing else: the order of
arrival, tags and transports play no part, so receives may come in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stagelink.errors import ProtocolError
from stagelink.transport.header import Direction

if TYPE_CHECKING:
    import torch

    from stagelink.exchange.link import InLink
    from stagelink.transport.header import Header

__all__ = ["Arrival", "Inbox", "Key"]


class Key(NamedTuple):
    """What identifies a message between two ranks."""

    session: int
    edge: int
    direction: Direction
    microbatch: int

    def __str__(self) -> str:
        way = "forward" if self.direction is Direction.FORWARD else "backward"
        return f"microbatch {self.microbatch} ({way}, session {self.session})"


class Arrival:
    """One message at its receiver.

    Attributes:
        header: what it is.
        peer: who sent it.
        link: the link that carries its payload; None when it came inline or has none.
        payload: its bytes, flat uint8, once `settled`; None for a NONE or REFUSED message.
        settled: whether nothing more has to come.
        refusal: the sender's error in place of a payload, or None.
        abandoned: nobody will ask for it; it is to be answered and dropped when settled.
    """

    __slots__ = ("abandoned", "header", "link", "payload", "peer", "refusal", "settled")

    def __init__(self, header: Header, peer: int) -> None:
        self.header = header
        self.peer = peer
        self.link: InLink | None = None
        self.payload: torch.Tensor | None = None
        self.settled = False
        self.refusal: str | None = None
        self.abandoned = False

    @property
    def key(self) -> Key:
        """What it is found by."""
        header = self.header
        return Key(header.session, header.edge, header.direction, header.microbatch)


class Inbox:
    """Arrivals by key; used under the plane's lock."""

    def __init__(self) -> None:
        self._arrivals: dict[Key, Arrival] = {}
        self._last: dict[tuple[int, Direction, int], tuple[int, int]] = {}

    def put(self, arrival: Arrival) -> None:
        """Keep an arrival until it is taken; one that was refused is replaced by a better one.

        Raises:
            ProtocolError: one with this key is here already.
        """
        key = arrival.key
        held = self._arrivals.get(key)
        if held is not None and held.refusal is None:
            raise ProtocolError(f"rank {arrival.peer} sent {key} of edge {key.edge} twice")
        self._arrivals[key] = arrival
        self._last[key.edge, key.direction, arrival.peer] = (key.session, key.microbatch)

    def get(self, key: Key) -> Arrival | None:
        """The arrival with this key, which stays."""
        return self._arrivals.get(key)

    def take(self, key: Key) -> Arrival:
        """Remove the arrival with this key."""
        return self._arrivals.pop(key)

    def take_session(self, session: int) -> list[Arrival]:
        """Remove everything of one session."""
        keys = [key for key in self._arrivals if key.session == session]
        return [self._arrivals.pop(key) for key in keys]

    def clear(self) -> list[Arrival]:
        """Remove everything."""
        arrivals = list(self._arrivals.values())
        self._arrivals.clear()
        return arrivals

    def last_microbatch(self, key: Key, peer: int) -> int | None:
        """The microbatch that came last from a peer on this edge, direction and session."""
        session, microbatch = self._last.get((key.edge, key.direction, peer), (None, None))
        return microbatch if session == key.session else None

    def __len__(self) -> int:
        return len(self._arrivals)
