"""Goodbyes between a rank and its peers, in both directions, each said once.

Who has said goodbye sends no more messages of its own accord, and still takes what is on its way
to it, until its connection ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stagelink.control.connection import Connection, Frame
from stagelink.control.reader import Reader
from stagelink.errors import PeerClosedError
from stagelink.transport.header import Header, MessageKind


class Goodbyes:
    """Goodbyes of one rank; its reader's lock guards them."""

    def __init__(self, rank: int, reader: Reader, connections: Mapping[int, Connection]) -> None:
        self.gone: dict[int, str] = {}  # peers that said goodbye, and how they left
        # those of them whose connection has ended, so that nothing reaches them any more
        self.ended: dict[int, str] = {}
        self.said: set[int] = set()  # peers to which this rank has said goodbye
        self.farewell = "closed"  # how this rank leaves, told with its goodbye
        self._rank = rank
        self._reader = reader
        self._connections = connections
        self._on_goodbye: list[Callable[[int], None]] = []
        self._on_ended: list[Callable[[int], None]] = []
        self._busy: list[Callable[[int], bool]] = []

    def on_goodbye(self, callback: Callable[[int], None]) -> None:
        """Call back with each peer that says goodbye; on the reading thread, returns at once."""
        self._on_goodbye.append(callback)

    def on_ended(self, callback: Callable[[int], None]) -> None:
        """Call back with each peer in `ended`; on the reading thread, must return at once."""
        self._on_ended.append(callback)

    def hold(self, busy: Callable[[int], bool]) -> None:
        """Ask ``busy(peer)``, whether something is still on its way there, before a goodbye."""
        self._busy.append(busy)

    def check_here(self, peer: int, awaited: str) -> bool:
        """False while the peer is here; for use in a ``ready``.

        `PeerClosedError` where it said goodbye, so what is awaited from it can never come.
        """
        if peer in self.gone:
            raise PeerClosedError(
                f"rank {self._rank}: peer rank {peer} {self.gone[peer]}; {awaited} expected"
            )
        return False

    def check_reached(self, peer: int, awaited: str) -> bool:
        """Check like `check_here` what a peer still does after its goodbye, until its end."""
        return peer in self.ended and self.check_here(peer, awaited)

    def say(self, peer: int, *, anyway: bool = False) -> bool:
        """Say goodbye to a peer, once, ``anyway`` also where something is on its way there.

        Returns at once, whether it has been said.
        """
        # Asked with the lock: what goes on from one that holds to the next is seen by either.
        with self._reader.lock:
            if peer not in self.said and (anyway or not any(busy(peer) for busy in self._busy)):
                self.said.add(peer)
                self._connections[peer].send(Header(MessageKind.BYE), self.farewell.encode())
        return peer in self.said

    # -- on the reading thread

    def hear(self, peer: int, frame: Frame) -> None:
        """Hear a peer's goodbye, and return it if nothing is on its way there."""
        how = frame.note.decode(errors="replace") or "closed"
        with self._reader.lock:
            self.gone[peer] = how
        for callback in self._on_goodbye:
            callback(peer)
        # The peer takes what is on its way to it until it hears that nothing is left.
        self.say(peer)
        self._reader.changed()

    def end(self, peer: int) -> None:
        """Note that a peer's connection has ended, rightly."""
        with self._reader.lock:
            self.ended[peer] = self.gone.setdefault(peer, "closed")
        for callback in self._on_ended:
            callback(peer)
