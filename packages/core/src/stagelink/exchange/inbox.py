"""Messages that have arrived and have not been asked for yet, by key.

A message is found by (session, edge, direction, microbatch) and by nothing else: the order of
arrival, tags and transports play no part, so receives may come in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from stagelink.errors import ProtocolError
from stagelink.links.arrival import Arrival, Key
from stagelink.transport.header import Direction

A = TypeVar("A", bound="Arrival")


class Inbox(Generic[A]):
    """Arrivals by key; used under the plane's lock."""

    def __init__(self) -> None:
        # of the payloads of all arrivals, in whole, also where they are still coming
        self.held_bytes = 0
        self._arrivals: dict[Key, A] = {}
        # gives the arrival with a key, which stays; None where there is none
        self.get: Callable[[Key], A | None] = self._arrivals.get
        self._last: dict[tuple[int, int, Direction, int], int] = {}

    def put(self, arrival: A) -> None:
        """Keep an arrival until it is taken; one that was refused is replaced by a better one."""
        key = arrival.key
        held = self._arrivals.get(key)
        if held is not None and held.refusal is None:
            raise ProtocolError(f"rank {arrival.peer} sent {key} of edge {key.edge} twice")
        if held is not None:
            self.take(key)
        self._arrivals[key] = arrival
        self.held_bytes += arrival.header.payload_bytes
        self._last[key.session, key.edge, key.direction, arrival.peer] = key.microbatch

    def __contains__(self, key: Key) -> bool:
        return key in self._arrivals

    def take_whole(self, key: Key) -> A | None:
        """Remove the arrival with this key, if it is here with its payload."""
        arrival = self._arrivals.get(key)
        if arrival is None or not arrival.settled:
            return None
        del self._arrivals[key]
        self.held_bytes -= arrival.header.payload_bytes
        return arrival

    def take(self, key: Key) -> A:
        """Remove the arrival with this key."""
        arrival = self._arrivals.pop(key)
        self.held_bytes -= arrival.header.payload_bytes
        return arrival

    def take_session(self, session: int) -> list[A]:
        """Remove everything of one session."""
        if self._last:
            self._last = {k: last for k, last in self._last.items() if k[0] > session}
        if not self._arrivals:
            return []
        keys = [key for key in self._arrivals if key.session == session]
        return [self.take(key) for key in keys]

    def clear(self) -> list[A]:
        """Remove everything."""
        arrivals = list(self._arrivals.values())
        self._arrivals.clear()
        self.held_bytes = 0
        return arrivals

    def last_microbatch(self, key: Key, peer: int) -> int | None:
        """The microbatch that came last from a peer on this edge, direction and session."""
        return self._last.get((key.session, key.edge, key.direction, peer))

    def __len__(self) -> int:
        return len(self._arrivals)
