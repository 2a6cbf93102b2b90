"""Messages that come in: announced, received whether asked for or not, kept until asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from stagelink.control.chain import Awaited
from stagelink.control.connection import Frame
from stagelink.deadline import Deadline
from stagelink.errors import DeadlineError, MessageError, ProtocolError, RefusedError
from stagelink.exchange.inbox import Inbox
from stagelink.exchange.outgoing import Outgoing
from stagelink.exchange.sessions import Sessions
from stagelink.links.arrival import Arrival, Key
from stagelink.links.bound import check_declared
from stagelink.links.node import Node
from stagelink.links.route import InRoute, Observe
from stagelink.transport.header import Flag, Header, MessageKind

_TENSORS = frozenset({MessageKind.DATA, MessageKind.GRAD})


class Received(Arrival):
    """A message of an edge, with the route that it came by."""

    __slots__ = ("route",)
    route: InRoute


class Incoming:
    """Receiving side of this rank.

    Of the ``sessions`` it learns who can still send something, and which microbatches there are;
    a gradient gives back credit of ``outgoing``, which gives credit to peers, too. Waits and takes
    raise where the handler has failed or was closed.
    """

    def __init__(
        self, node: Node, sessions: Sessions, outgoing: Outgoing, observe: Observe | None
    ) -> None:
        self._plane = node.plane
        self._routes = node.wiring.into
        self._sessions = sessions
        self._outgoing = outgoing
        self._observe = observe
        self._most_bytes = node.plan.limits.receive_bytes
        self._completed = self._on_complete  # bound once, not for each message
        self._unanswered: list[Received] = []
        # what nobody has asked for yet; beyond the plan's ``limits.receive_bytes`` it is an error
        self.inbox: Inbox[Received] = Inbox()
        for kind in (MessageKind.DATA, MessageKind.GRAD, MessageKind.NONE, MessageKind.REFUSED):
            self._plane.handle(kind, self._on_message)

    def drop(self, unread: Sequence[Received], owed: Sequence[Received] = ()) -> None:
        """Answer messages that nobody will ask for, each now or when it is whole.

        The ``unread`` were taken out of the inbox; of those ``owed`` no gradient will be sent.
        """
        if not unread and not owed:
            return
        with self._plane.lock:
            for arrival in unread:
                arrival.abandoned = True
            settled = [arrival for arrival in unread if arrival.settled]
        self._answer_all([*settled, *owed])

    # -- on the reading thread

    def _on_message(self, peer: int, frame: Frame) -> None:  # noqa: C901 - no frame more a message
        header = frame.header
        route = self._routes.get((header.edge, header.direction, peer))
        if route is None:
            raise ProtocolError(
                f"rank {peer} sent {header.kind.name} on edge {header.edge}, which does not come "
                "from it"
            )
        if header.microbatch < 0:
            raise ProtocolError(
                f"rank {peer}: {header.kind.name} of microbatch {header.microbatch} on edge "
                f"{route.edge.name!r}; they begin at 0"
            )
        arrival = Received(header, peer, self._completed)
        arrival.route = route
        with self._plane.lock:
            sessions = self._sessions
            record = sessions.records.get(header.session) or sessions.find(header.session, peer)
            if record is not None:
                record.check(header.microbatch)
            if route.answers is not None:
                self._outgoing.check_sent(route.answers, header, header.microbatch)
            elif header.kind is not MessageKind.REFUSED:  # which takes no credit
                route.window.take(header.session, header.microbatch)
            if header.kind in _TENSORS and (route.has_contract or not header.dtype_code):
                check_declared(route.edge, header)
            carried = self._open_envelope(arrival, frame)
            # As it is now: a session that is left from here on answers what it finds itself.
            abandoned = arrival.abandoned = header.session <= self._sessions.left
            if not abandoned:
                if self._most_bytes is not None:
                    self._check_room(route, arrival, self._most_bytes)
                self.inbox.put(arrival)
        if carried:
            fds = frame.take_fds() if frame.fds else ()
            route.link.announced(arrival, frame.note, fds)
        elif abandoned:
            if not self._unanswered:
                self._plane.reader.call(self._answer_unanswered)
            self._unanswered.append(arrival)

    def _answer_unanswered(self) -> None:
        """Answer, at the end of a turn of reading, what came in it and nobody will ask for."""
        unanswered, self._unanswered = self._unanswered, []
        self._answer_all(unanswered)

    def _check_room(self, route: InRoute, arrival: Arrival, most_bytes: int) -> None:
        """Hold what has come against the plan's bound, as a plan without shapes bounds nothing."""
        held, size = self.inbox.held_bytes, arrival.header.payload_bytes
        if held + size > most_bytes:
            raise MessageError(
                f"rank {self._plane.rank}: {arrival.key} from rank {route.peer} on edge "
                f"{route.edge.name!r} has {size} bytes, and {held} bytes of messages have come "
                "that nobody has taken yet; limits.receive_bytes allows "
                f"{most_bytes} together"
            )

    @staticmethod
    def _open_envelope(arrival: Arrival, frame: Frame) -> bool:
        """Take what came with the header; True if a transport carries the payload."""
        header = frame.header
        if header.kind is MessageKind.REFUSED:
            arrival.refusal = frame.note.decode(errors="replace")
        elif header.flags & Flag.INLINE:
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

    def _on_complete(self, arrival: Received) -> None:
        """A transport has finished an arrival; on whichever thread finished it."""
        with self._plane.lock:
            arrival.settled = True
            abandoned = arrival.abandoned
        if abandoned:
            # Not here: what is parked for the credit starts, and this may be within a ``begin``.
            self._plane.reader.call(partial(self._answer_all, [arrival]))
        self._plane.changed()

    # -- answers

    def _answer_all(self, arrivals: Iterable[Received]) -> None:
        """Answer messages; the credit of those of one session and route goes in one frame."""
        credit: dict[tuple[int, int, int], list[int]] = {}
        for arrival in arrivals:
            session, edge, _, microbatch = arrival.key
            arrival.payload = None
            route = arrival.route
            if arrival.refusal is not None:
                continue
            if route.answers is not None:
                self._outgoing.release(route.answers, session, microbatch)
            else:
                # Also where a gradient is due: a NONE would be taken for it.
                route.window.free((session, microbatch))
                credit.setdefault((edge, route.peer, session), []).append(microbatch)
        for to, microbatches in credit.items():
            self._outgoing.give_credit(*to, *microbatches)

    # -- for who asks

    def take_nowait(self, route: InRoute, key: Key) -> Received | None:
        """Take a message that is here with its payload; None where it is not.

        Its credit is given back, unless it is a tensor that takes a gradient. `RefusedError` where
        the peer could not send it.
        """
        plane = self._plane
        try:
            if plane.reader.ending:
                plane.check()
            with plane.lock:
                arrival = self.inbox.take_whole(key)
            if arrival is not None:
                now = 0.0 if self._observe is None else time.monotonic()
                self._hand_over(route, arrival, now, now)
        except BaseException as error:
            # It may have been taken, and would be lost.
            plane.failure.interrupted(error, foreign=True)
            raise
        return arrival

    def take(self, route: InRoute, key: Key, deadline: Deadline) -> Received:
        """Wait for one message and take it, as `take_nowait`.

        `DeadlineError` where it does not come, `PeerClosedError` where it no longer can.
        """
        try:
            began = arrived = time.monotonic()
            arrival = None
            while arrival is None:  # in its place there may be another: a refusal's second try
                if self.inbox.get(key) is None:
                    ready = partial(self._arrived, route, key)
                    # Not by its name, which would be a frame more.
                    awaited = tuple.__new__(Awaited, (route.peer, partial(_what, route, key)))
                    if not self._plane.wait(ready, deadline, awaited):
                        raise self._late(route, key, deadline, "nothing came", awaited)  # noqa: TRY301
                arrived = time.monotonic()
                with self._plane.lock:
                    arrival = self.inbox.take_whole(key)
                if arrival is None:
                    self._wait_settled(route, key, deadline)
            self._hand_over(route, arrival, began, arrived)
        except BaseException as error:
            self._plane.failure.interrupted(error, foreign=True)
            raise
        return arrival

    def _hand_over(self, route: InRoute, arrival: Received, began: float, arrived: float) -> None:
        if arrival.refusal is not None:
            # The text is the sender's own, which says who it is and which message it means.
            raise RefusedError(f"the sender could not send it: {arrival.refusal}")
        counters, header = route.counters, arrival.header
        counters.messages += 1
        counters.payload_bytes += header.payload_bytes
        if header.flags & Flag.INLINE:
            counters.inline_messages += 1
        if arrived != began or self._observe is not None:
            self._count_waits(route, header, began, arrived)
        if arrival.event is not None:
            route.link.hand_to_caller(arrival)
        if route.answers is not None:
            self._outgoing.release(route.answers, header.session, header.microbatch)
        elif not header.flags & Flag.REQUIRES_GRAD:
            route.window.free((header.session, header.microbatch))
            self._outgoing.give_credit(header.edge, route.peer, header.session, header.microbatch)

    def _count_waits(self, route: InRoute, header: Header, began: float, arrived: float) -> None:
        ended = time.monotonic()
        peer_wait_s, wire_wait_s = arrived - began, ended - arrived
        route.counters.peer_wait_s += peer_wait_s
        route.counters.wire_wait_s += wire_wait_s
        if self._observe is not None:
            link = route.link.link
            self._observe("wait_peer", link, header, peer_wait_s, arrived)
            self._observe("wait_wire", link, header, wire_wait_s, ended)
            self._observe("recv", link, header, ended - began, ended)

    def wait_whole(self, route: InRoute, key: Key, deadline: Deadline) -> None:
        """Wait until a message is here with its payload, and leave it where it is; as `take`."""
        if self.inbox.get(key) is None:
            ready = partial(self._arrived, route, key)
            self._wait(route, key, ready, deadline, "nothing came")
        self._wait_settled(route, key, deadline)

    def _wait_settled(self, route: InRoute, key: Key, deadline: Deadline) -> None:
        self._plane.check()
        arrival = self.inbox.get(key)
        if arrival is not None and not arrival.settled:
            ready = partial(self._settled, route, key, arrival)
            what = f"the header came, and the payload over {route.link.link} did not,"
            self._wait(route, key, ready, deadline, what)

    def wait_announced(self, route: InRoute, key: Key, or_else: Callable[[], bool]) -> None:
        """Wait until a message's header is here, or something else is true; for however long.

        `PeerClosedError` where it can no longer come, and nothing else is true.
        """
        awaited = Awaited(route.peer, lambda: f"{route.edge.name!r}, {key}, or the end")
        self._plane.wait(
            lambda: or_else() or self._arrived(route, key), Deadline(math.inf), awaited
        )

    def here(self, route: InRoute, key: Key) -> bool:
        """Whether a message could be received now without waiting for the peer."""
        with self._plane.lock:
            arrival = self.inbox.get(key)
        return arrival is not None and arrival.settled

    def _wait(
        self, route: InRoute, key: Key, ready: Callable[[], bool], deadline: Deadline, what: str
    ) -> None:
        """Wait for a message of a route; `DeadlineError` where time ran out."""
        awaited = Awaited(route.peer, partial(_what, route, key))
        if not self._plane.wait(ready, deadline, awaited):
            raise self._late(route, key, deadline, what, awaited)

    def _late(
        self, route: InRoute, key: Key, deadline: Deadline, what: str, awaited: Awaited
    ) -> DeadlineError:
        why = self._plane.chain.explain(awaited)
        return DeadlineError(self._missing(route, key, deadline, what) + why)

    def _settled(self, route: InRoute, key: Key, arrival: Arrival) -> bool:
        if not arrival.settled and route.link.given_up:
            expected = self._expected(route, key)
            if route.link.error is not None:  # a failure here, though the peer had said goodbye
                expected = f"{expected}; {route.link.error}"
            self._sessions.check_peer(route.peer, key, expected)
        return arrival.settled

    def _arrived(self, route: InRoute, key: Key) -> bool:
        if self.inbox.get(key) is not None:
            return True
        if self._sessions.lost(route.peer, key):
            self._sessions.check_peer(route.peer, key, self._expected(route, key))
        return False

    def _expected(self, route: InRoute, key: Key) -> str:
        last = self.inbox.last_microbatch(key, route.peer)
        after = "before its first message" if last is None else f"after microbatch {last}"
        return f"it finished {after}; {key} expected on edge {route.edge.name!r}"

    def _missing(self, route: InRoute, key: Key, deadline: Deadline, what: str) -> str:
        last = self.inbox.last_microbatch(key, route.peer)
        before = "nothing yet" if last is None else f"microbatch {last}"
        return (
            f"rank {self._plane.rank}: {what} from rank {route.peer} on edge "
            f"{route.edge.name!r} within {deadline.seconds:g} s; expected {key}, got {before} in "
            "this session"
        )


def _what(route: InRoute, key: Key) -> str:
    return f"{route.edge.name!r}, {key}"
