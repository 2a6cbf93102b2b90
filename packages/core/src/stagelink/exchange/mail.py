"""Messages between the ends of edges: out by the window, in by the inbox, every place answered.

The life of one tensor: `Outgoing.send` → window → `OutLink` → ``Sender.begin`` → announce →
connection ⇒ connection → plane → `InLink` → ``Receiver.begin`` → ``Pending.finish`` → inbox →
`Incoming.receive`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from stagelink.errors import ProtocolError
from stagelink.exchange.incoming import Incoming
from stagelink.exchange.outgoing import Outgoing
from stagelink.exchange.presence import Presence

if TYPE_CHECKING:
    from stagelink.control.plane import Plane
    from stagelink.exchange.endings import Endings
    from stagelink.links.arrival import Key
    from stagelink.links.ways import Observe, Trace
    from stagelink.plan import Edge

__all__ = ["Mail"]

_LAST_SESSION = 2**32


class Mail:
    """All messages of one rank.

    Args:
        plane: this rank's control plane.
        inline_bytes: payloads up to this size travel in the header's frame.
        observe: called with each event; None where nobody observes.
        trace: asked for the trace context of each message that is sent; None: they carry none.
        endings: which sessions that were opened until the end have ended.

    Attributes:
        out: what it sends.
        into: what it receives.
        endings: as given.
    """

    def __init__(
        self,
        plane: Plane,
        inline_bytes: int,
        observe: Observe | None,
        trace: Trace | None,
        endings: Endings,
    ) -> None:
        self._plane = plane
        self._presence = Presence(plane, endings)
        self.out = Outgoing(plane, self._presence, inline_bytes, observe, trace)
        self.into = Incoming(plane, self._presence, self.out, observe, endings)
        self.endings = endings

    def enter(self, session: int, window_of: Callable[[Edge], int]) -> None:
        """A session begins, with windows of these sizes.

        Raises:
            ProtocolError: a peer has sent more than its window allows.
        """
        try:
            with self._plane.lock:
                self.out.enter(window_of)
                self.into.places.enter(session, self.into.ways.values(), window_of)
        except ProtocolError as error:
            # Without the lock: a failure aborts transports, and their threads may wait for it.
            self._plane.fail(error)
            self._plane.check()

    def leave(self, session: int, owed: Iterable[tuple[int, Key]], why: str) -> None:
        """A session ends: tell the peers, answer what nobody will ask for, wait for nobody.

        Args:
            session: its number.
            owed: producer and key of each message that was received and not answered.
            why: the error that ended it, for the peers; empty where none did.
        """
        if self._plane.failure.forked:
            return
        # Before any answer: with a place in its window a sender goes on, and loses what it sends.
        self.out.tell_end(session, why)
        with self._plane.lock:
            self._presence.leave(session)
            self.endings.leave(session)
            unread = self.into.inbox.take_session(session)
        self.into.drop(unread)
        for peer, key in owed:
            self.into.post_credit(peer, key)

    def stopped(self, session: int) -> bool:
        """Whether a peer has stopped a session for all."""
        return self._presence.stopped(session)

    def abandon(self) -> None:
        """The handler is being closed: nobody will ask for what is here, nor for what comes."""
        with self._plane.lock:
            self._presence.leave(_LAST_SESSION)
            self.into.places.lift()
            unread = self.into.inbox.clear()
        self.into.drop(unread)
