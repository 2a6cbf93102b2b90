"""Messages that come in: announced, received whether asked for or not, kept until asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from stagelink.control.chain import Awaited
from stagelink.deadline import Deadline
from stagelink.errors import (
    DeadlineError,
    MessageError,
    ProtocolError,
    RefusedError,
)
from stagelink.exchange.inbox import Inbox
from stagelink.exchange.places import Places
from stagelink.links.arrival import Arrival, Key
from stagelink.links.bound import check_declared
from stagelink.links.driving import wait_driving
from stagelink.transport.header import Direction, Header, MessageKind

if TYPE_CHECKING:
    from stagelink.control.connection import Frame
    from stagelink.control.plane import Plane
    from stagelink.exchange.endings import Endings
    from stagelink.exchange.outgoing import Outgoing
    from stagelink.exchange.presence import Presence
    from stagelink.links.ways import Observe, WayIn

__all__ = ["Incoming"]


class Incoming:
    """What this rank receives.

    Args:
        plane: this rank's control plane.
        presence: who can still send something.
        outgoing: whose windows a gradient that nobody asks for must free.
        observe: called with each event; None where nobody observes.
        endings: which microbatches there are.

    Attributes:
        inbox: what nobody has asked for yet.
        places: what the peers' windows hold.
        most_bytes: bound on what is in it, which a message beyond it breaks; None: no bound.
        ways: by (edge index, direction, peer).
    """

    def __init__(
        self,
        plane: Plane,
        presence: Presence,
        outgoing: Outgoing,
        observe: Observe | None,
        endings: Endings,
    ) -> None:
        self._plane = plane
        self._endings = endings
        self._presence = presence
        self._outgoing = outgoing
        self._observe = observe
        self.inbox = Inbox()
        self.places = Places()
        outgoing.on_answer = self.places.free
        self.most_bytes: int | None = None
        self._completed = self._on_settled  # bound once, not per message
        self.ways: dict[tuple[int, Direction, int], WayIn] = {}
        for kind in (MessageKind.DATA, MessageKind.GRAD, MessageKind.NONE, MessageKind.REFUSED):
            plane.handle(kind, self._on_message)

    def drop(self, arrivals: list[Arrival]) -> None:
        """Answer messages that were taken out of the inbox unread, now or when they are whole."""
        with self._plane.lock:
            for arrival in arrivals:
                arrival.abandoned = True
            settled = [arrival for arrival in arrivals if arrival.settled]
        for arrival in settled:
            self._answer(arrival)
        for arrival in arrivals:
            if arrival.link is not None:
                arrival.link.drain()

    def _on_message(self, peer: int, frame: Frame) -> None:
        header = frame.header
        way = self.ways.get((header.edge, header.direction, peer))
        if way is None:
            raise ProtocolError(
                f"rank {peer} sent {header.kind.name} on edge {header.edge}, which does not come "
                "from it"
            )
        self._endings.check(header.session, header.microbatch)
        self._check_due(way, header)
        if header.kind in {MessageKind.DATA, MessageKind.GRAD}:
            check_declared(way.edge, header)
        arrival = Arrival(header, peer, self._completed)
        carried = self._open_envelope(arrival, frame)
        if carried:
            arrival.link = way.link
        with self._plane.lock:
            arrival.abandoned = header.session <= self._presence.left
            if not arrival.abandoned:
                self._check_room(way, arrival, frame)
                self.inbox.put(arrival)
        if carried:
            way.link.announced(arrival, frame.note, frame.take_fds())
        elif arrival.abandoned:
            self._answer(arrival)

    def _check_due(self, way: WayIn, header: Header) -> None:
        """Hold a message against the window that its sender has, or against what it answers.

        Raises:
            ProtocolError: there is no place for it, or nothing that it answers.
        """
        if header.microbatch < 0:
            raise ProtocolError(
                f"rank {way.peer}: {header.kind.name} of microbatch {header.microbatch} on edge "
                f"{way.edge.name!r}; they begin at 0"
            )
        if header.direction is Direction.BACKWARD:
            there = self._outgoing.ways[header.edge, Direction.FORWARD, way.peer]
            self._outgoing.check_sent(there, header)
        elif header.kind is not MessageKind.REFUSED:  # which takes no place
            with self._plane.lock:
                self.places.take(way, header)

    def _check_room(self, way: WayIn, arrival: Arrival, frame: Frame) -> None:
        """Hold what has come against `most_bytes`, of which a plan without shapes says nothing.

        Raises:
            MessageError: it is more.
        """
        held, size = self.inbox.held_bytes, arrival.header.payload_bytes
        if self.most_bytes is not None and held + size > self.most_bytes:
            raise MessageError(
                f"rank {self._plane.rank}: {arrival.key} from rank {way.peer} on edge "
                f"{way.edge.name!r} has {size} bytes, and {held} bytes of messages have come that "
                f"nobody has taken yet; limits.receive_bytes allows {self.most_bytes} together"
            )

    @staticmethod
    def _open_envelope(arrival: Arrival, frame: Frame) -> bool:
        """Take what came with the header; True if a transport carries the payload."""
        header = frame.header
        if header.kind is MessageKind.REFUSED:
            arrival.refusal = frame.note.decode(errors="replace")
        elif header.inline:
            if len(frame.payload) != header.payload_bytes:  # it came by no socket, see `Header`
                raise ProtocolError(
                    f"an inline payload of {header.payload_bytes} bytes, of which "
                    f"{len(frame.payload)} came"
                )
            arrival.payload = frame.payload
        elif header.kind is not MessageKind.NONE:
            return True
        arrival.settled = True
        return False

    def _on_settled(self, arrival: Arrival) -> None:
        """A transport has finished an arrival; on whichever thread finished it."""
        with self._plane.lock:
            arrival.settled = True
            abandoned = arrival.abandoned
        if abandoned:
            self._answer(arrival)
        self._plane.changed()

    def _answer(self, arrival: Arrival) -> None:
        """Answer a message that nobody asked for, so that its sender's window recovers."""
        key = arrival.key
        arrival.payload = None
        if arrival.refusal is not None:
            return
        if key.direction is Direction.BACKWARD:
            way = self._outgoing.ways[key.edge, Direction.FORWARD, arrival.peer]
            self._outgoing.release(way, key.session, key.microbatch)
        else:
            # Also where a gradient is due: a NONE would be taken for it, a CREDIT frees a place.
            self.post_credit(arrival.peer, key)

    def post_credit(self, peer: int, key: Key) -> None:
        """Free the place of a message whose gradient, if it takes one, will not come."""
        self.places.free(peer, key)
        header = Header(
            MessageKind.CREDIT,
            Direction.BACKWARD,
            session=key.session,
            edge=key.edge,
            microbatch=key.microbatch,
        )
        self._plane.post(peer, header)

    def receive(self, way: WayIn, key: Key, deadline: Deadline) -> Arrival:
        """Wait for one message and take it.

        Raises:
            DeadlineError: it did not come.
            RefusedError: the peer could not send it.
            PeerClosedError: it can no longer come.
            StagelinkError: the handler failed or was closed.
        """
        try:
            return self._receive(way, key, deadline)
        except BaseException as error:
            self._plane.failure.interrupted(error)  # it may have been taken, and would be lost
            raise

    def _receive(self, way: WayIn, key: Key, deadline: Deadline) -> Arrival:
        began = time.monotonic()
        arrival, arrived = self.wait_whole(way, key, deadline)
        while not self._take(key, arrival):
            # In its place there is another by now: a refusal's second try, or nothing after close.
            arrival, arrived = self.wait_whole(way, key, deadline)
        if arrival.refusal is not None:
            # The text is the sender's own, which says who it is and which message it means.
            raise RefusedError(f"the sender could not send it: {arrival.refusal}")
        self._count(way, arrival, began, arrived)
        way.link.hand_over(arrival)
        return arrival

    def wait_whole(self, way: WayIn, key: Key, deadline: Deadline) -> tuple[Arrival, float]:
        """Wait until a message is here with its payload, and leave it where it is.

        Returns:
            The message, and the moment at which its header was here.

        Raises:
            DeadlineError, PeerClosedError, StagelinkError: as `receive`.
        """
        self._plane.check()
        if key not in self.inbox:
            self._wait(way, key, partial(self._arrived, way, key), deadline, "nothing came")
        arrived = time.monotonic()
        arrival = self.inbox.get(key)
        if arrival is None:
            return self.wait_whole(way, key, deadline)
        if not arrival.settled:
            ready = partial(self._settled, way, key, arrival)
            self._wait(way, key, ready, deadline, "the payload did not come")
        return arrival, arrived

    def wait_announced(self, way: WayIn, key: Key, or_else: Callable[[], bool]) -> None:
        """Wait until a message's header is here, or something else is true; for however long.

        Raises:
            PeerClosedError: it can no longer come, and nothing else is true.
            StagelinkError: the handler failed or was closed.
        """
        awaited = Awaited(way.peer, lambda: f"{way.edge.name!r}, {key}, or the end")
        self._plane.wait(lambda: or_else() or self._arrived(way, key), Deadline(math.inf), awaited)

    def _take(self, key: Key, arrival: Arrival) -> bool:
        with self._plane.lock:
            if self.inbox.get(key) is not arrival:
                return False
            self.inbox.take(key)
            return True

    def _settled(self, way: WayIn, key: Key, arrival: Arrival) -> bool:
        if not arrival.settled and way.link.given_up:
            expected = self._expected(way, key)
            if way.link.error is not None:  # a failure here, though the peer had said goodbye
                expected = f"{expected}; {way.link.error}"
            self._presence.check_peer(way.peer, key, expected)
        return arrival.settled

    def _wait(
        self, way: WayIn, key: Key, ready: Callable[[], bool], deadline: Deadline, what: str
    ) -> None:
        """Wait; see `wait_driving`.

        Raises:
            DeadlineError: time ran out.
        """
        awaited = Awaited(way.peer, lambda: f"{way.edge.name!r}, {key}")
        if not wait_driving(self._plane, way.link, ready, deadline, awaited):
            why = self._plane.chain.explain(awaited)
            raise DeadlineError(self._missing(way, key, deadline, what) + why)

    def _count(self, way: WayIn, arrival: Arrival, began: float, arrived: float) -> None:
        ended = time.monotonic()
        peer_wait_s, wire_wait_s = arrived - began, ended - arrived
        counters, header = way.counters, arrival.header
        counters.messages += 1
        counters.payload_bytes += header.payload_bytes
        counters.peer_wait_s += peer_wait_s
        counters.wire_wait_s += wire_wait_s
        if header.inline:
            counters.inline_messages += 1
        if self._observe is not None:
            link = way.link.link
            self._observe("wait_peer", link, header, peer_wait_s, arrived)
            self._observe("wait_wire", link, header, wire_wait_s, ended)
            self._observe("recv", link, header, ended - began, ended)

    def here(self, way: WayIn, key: Key) -> bool:
        """Whether a message could be received now without waiting for the peer."""
        with self._plane.lock:
            arrival = self.inbox.get(key)
        if arrival is None:
            return False
        if not arrival.settled and way.link.drivable:
            way.link.drain()  # whoever asks does not wait, so a worker does
        return arrival.settled

    def _arrived(self, way: WayIn, key: Key) -> bool:
        if key in self.inbox:
            return True
        if self._presence.lost(way.peer, key):
            self._presence.check_peer(way.peer, key, self._expected(way, key))
        return False

    def _expected(self, way: WayIn, key: Key) -> str:
        last = self.inbox.last_microbatch(key, way.peer)
        after = "before its first message" if last is None else f"after microbatch {last}"
        return f"it finished {after}; {key} expected on edge {way.edge.name!r}"

    def _missing(self, way: WayIn, key: Key, deadline: Deadline, what: str) -> str:
        last = self.inbox.last_microbatch(key, way.peer)
        before = "nothing yet" if last is None else f"microbatch {last}"
        return (
            f"rank {self._plane.rank}: {what} from rank {way.peer} on edge {way.edge.name!r} "
            f"within {deadline.seconds:g} s; expected {key}, got {before} in this session"
        )
