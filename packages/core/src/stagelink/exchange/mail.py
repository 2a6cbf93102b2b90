"""Messages between the ends of edges: out by the window, in by the inbox, every place answered.

The life of one tensor: `Mail.send` → window → `OutLink` → ``Sender.begin`` → announce →
    connection ⇒
connection → plane → `InLink` → ``Receiver.begin`` → ``Pending.finish`` → inbox → `Mail.receive`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from stagelink.errors import (
    DeadlineError,
    PeerClosedError,
    ProtocolError,
    RefusedError,
    StagelinkError,
)
from stagelink.exchange.inbox import Arrival, Inbox, Key
from stagelink.transport.header import Direction, Flag, Header, MessageKind

if TYPE_CHECKING:
    from stagelink.control.connection import Frame
    from stagelink.control.plane import Plane
    from stagelink.exchange.link import InLink, OutLink, SendJob
    from stagelink.exchange.window import Window
    from stagelink.plan import Edge
    from stagelink.transport.contract import Deadline, Link
    from stagelink.transport.events import EventName, LinkCounters

__all__ = ["Mail", "Observe", "WayIn", "WayOut"]

_LAST_SESSION = 2**32
_MAX_TEXT_BYTES = 64 * 1024

Observe = Callable[["EventName", "Link", Key, int, float], None]
"""Tell observers: event, link, key, payload bytes, seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class WayOut:
    """One direction of an edge towards one peer, at the sending rank."""

    edge: Edge
    direction: Direction
    peer: int
    link: OutLink
    window: Window | None
    counters: LinkCounters


@dataclass(frozen=True, slots=True, eq=False)
class WayIn:
    """One direction of an edge from one peer, at the receiving rank."""

    edge: Edge
    direction: Direction
    peer: int
    link: InLink
    counters: LinkCounters


class Mail:
    """All messages of one rank.

    Args:
        plane: this rank's control plane.
        inline_bytes: payloads up to this size travel in the header's frame.
        observe: called with each event; None where nobody observes.
    """

    def __init__(self, plane: Plane, inline_bytes: int, observe: Observe | None) -> None:
        self._plane = plane
        self._inline_bytes = inline_bytes
        self._observe = observe
        self.inbox = Inbox()
        self.ways_out: dict[tuple[int, Direction, int], WayOut] = {}
        self.ways_in: dict[tuple[int, Direction, int], WayIn] = {}
        self._current = -1
        self._left = -1
        self._ended: dict[tuple[int, int], str] = {}
        for kind in (MessageKind.DATA, MessageKind.GRAD, MessageKind.NONE, MessageKind.REFUSED):
            plane.handle(kind, self._on_message)
        plane.handle(MessageKind.CREDIT, self._on_credit)
        plane.handle(MessageKind.END, self._on_end)

    # -- sessions

    def enter(self, session: int, window_of: Callable[[Edge], int]) -> None:
        """A session begins: its windows' sizes hold from now on."""
        with self._plane.lock:
            self._current = session
            for way in self.ways_out.values():
                if way.window is not None:
                    way.window.size = window_of(way.edge)

    def leave(self, session: int, owed: Iterable[tuple[int, Key]], why: str) -> None:
        """A session ends: answer what nobody will ask for, tell the peers, wait for nobody.

        Args:
            session: its number.
            owed: producer and key of each message that was received and not answered.
            why: the error that ended it, for the peers; empty where none did.
        """
        if self._plane.forked:
            return
        for peer, key in owed:
            self.post_credit(peer, key)
        with self._plane.lock:
            self._left = session
            dropped = self.inbox.take_session(session)
            for arrival in dropped:
                arrival.abandoned = True
            settled = [arrival for arrival in dropped if arrival.settled]
            for way in self.ways_out.values():
                if way.window is not None:
                    way.window.forget_parked()
            self._ended = {key: why for key, why in self._ended.items() if key[0] > session}
        for arrival in settled:
            self._answer(arrival)
        for arrival in dropped:
            if arrival.link is not None:
                arrival.link.drain()
        self._tell_end(session, why)

    def abandon(self) -> None:
        """The handler is being closed: nobody will ask for what is here, nor for what comes."""
        with self._plane.lock:
            self._left = _LAST_SESSION
            for arrival in self.inbox.clear():
                arrival.abandoned = True

    def _tell_end(self, session: int, why: str) -> None:
        links: dict[int, set[OutLink]] = {peer: set() for peer in self._plane.peers}
        for way in self.ways_out.values():
            links[way.peer].add(way.link)
        for peer, outs in links.items():
            header = Header(MessageKind.END, session=session)
            # On its connection the END comes after every header of the session: behind the queues.
            note = why.encode()[:_MAX_TEXT_BYTES]
            chain: Callable[[], None] = partial(self._plane.post, peer, header, note)
            for link in outs:
                chain = partial(link.when_announced, chain)
            chain()

    def _on_end(self, peer: int, frame: Frame) -> None:
        with self._plane.lock:
            if frame.header.session > self._left:
                self._ended[frame.header.session, peer] = frame.note.decode(errors="replace")

    def check_peer(self, peer: int, key: Key, awaited: Callable[[], str]) -> None:
        """Raise if the peer has left the session or closed, so that ``awaited()`` cannot come.

        Raises:
            PeerClosedError: it has.
        """
        why = self._ended.get((key.session, peer))
        if why is None and peer not in self._plane.gone:
            return
        what = "closed" if peer in self._plane.gone else f"left session {key.session}"
        raise PeerClosedError(
            f"rank {self._plane.rank}: peer rank {peer} {what}{why or ''}; {awaited()}"
        )

    # -- out

    def send(
        self,
        way: WayOut,
        key: Key,
        job: SendJob,
        *,
        copy: bool,
        deadline: Deadline | None,
    ) -> None:
        """Send one message when the window has a place for it.

        Args:
            way: where to.
            key: what it is.
            job: its header and payload.
            copy: the caller may overwrite the payload as soon as this returns.
            deadline: for the place; None: do not wait, start it when a place is free.

        Raises:
            DeadlineError: no place came free.
            PeerClosedError: the peer has left the session or closed.
            StagelinkError: the handler failed or was closed.
        """
        self._plane.check()
        self._plane.turns.touch()
        window = way.window
        if window is None:
            self._start(way, key, job, copy=copy)
        elif deadline is not None:
            self._wait_place(way, window, key, deadline)
            self._start(way, key, job, copy=copy)
        elif self._place_now(way, window, key):
            self._start(way, key, job, copy=copy)
        else:
            self._park(way, window, key, job, copy=copy)

    def _wait_place(self, way: WayOut, window: Window, key: Key, deadline: Deadline) -> None:
        if self._place_now(way, window, key):
            return
        began = time.monotonic()
        if not self._plane.wait(partial(self._place_now, way, window, key), deadline):
            raise DeadlineError(
                f"rank {self._plane.rank}: no place for {key} of edge {way.edge.name!r} to rank "
                f"{way.peer} within {deadline.seconds:g} s: the window of {window.size} is taken "
                f"by microbatches {window.outstanding()}, which rank {way.peer} has not answered; "
                "is its order of receives the schedule's?"
            )
        waited = time.monotonic() - began
        way.counters.window_wait_s += waited
        self._event("wait_window", way.link.link, key, 0, waited)

    def _place_now(self, way: WayOut, window: Window, key: Key) -> bool:
        with self._plane.lock:
            self.check_peer(way.peer, key, partial(self._undelivered, way, window, key))
            if window.open:
                window.admit(key.session, key.microbatch)
                return True
            return False

    @staticmethod
    def _undelivered(way: WayOut, window: Window, key: Key) -> str:
        lost = window.outstanding(key.session)
        return (
            f"{key} of edge {way.edge.name!r} was not sent, and {len(lost)} sent before it were "
            f"not answered{f' (microbatches {lost})' if lost else ''}"
        )

    def _park(self, way: WayOut, window: Window, key: Key, job: SendJob, *, copy: bool) -> None:
        if copy and job.payload is not None:
            job.payload = job.payload.clone()
        start = partial(self._start, way, key, job, copy=False)
        with self._plane.lock:
            # A place may have come free since; then nobody would start what is parked now.
            place = self._place_now(way, window, key)
            if not place:
                window.park(key.session, key.microbatch, start)
        if place:
            start()

    def _start(self, way: WayOut, key: Key, job: SendJob, *, copy: bool) -> None:
        job.started = True
        payload = job.payload
        size_bytes = job.header.payload_bytes
        if payload is None:
            self._plane.post(way.peer, job.header)
            job.finished = True
        elif size_bytes <= self._inline_bytes:
            header = job.header._replace(flags=job.header.flags | Flag.INLINE)
            self._plane.post(way.peer, header, payload=payload.numpy().tobytes())
            job.payload = None
            job.finished = True
            way.counters.inline_messages += 1
        else:
            try:
                way.link.submit(job, copy=copy)
            except StagelinkError as error:
                self._plane.blame(error)
                self._plane.check()
                raise
        way.counters.messages += 1
        way.counters.payload_bytes += size_bytes
        self._event("send", way.link.link, key, size_bytes, 0.0)

    def wait_sent(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        """Block until ``ready``: the memory of what was sent is the caller's again.

        Raises:
            DeadlineError: it took longer.
        """
        if not self._plane.wait(ready, deadline):
            raise DeadlineError(
                f"rank {self._plane.rank}: a message was still under way after "
                f"{deadline.seconds:g} s"
            )

    def refuse(self, way: WayOut, key: Key, text: str) -> None:
        """Tell the peer that this message cannot be sent, and why; it takes no place."""
        header = Header(
            MessageKind.REFUSED,
            key.direction,
            session=key.session,
            edge=key.edge,
            microbatch=key.microbatch,
        )
        self._plane.post(way.peer, header, text.encode()[:_MAX_TEXT_BYTES])

    def release(self, way: WayOut, session: int, microbatch: int) -> None:
        """A message is answered: free its place, and start what was parked for it."""
        if way.window is None:
            return
        with self._plane.lock:
            starts = way.window.release(session, microbatch)
        for start in starts:
            start()

    def _on_credit(self, peer: int, frame: Frame) -> None:
        header = frame.header
        way = self.ways_out.get((header.edge, Direction.FORWARD, peer))
        if way is None:
            raise ProtocolError(f"a credit for edge {header.edge}, which does not go there")
        self.release(way, header.session, header.microbatch)

    # -- in

    def _on_message(self, peer: int, frame: Frame) -> None:
        header = frame.header
        way = self.ways_in.get((header.edge, header.direction, peer))
        if way is None:
            raise ProtocolError(
                f"rank {peer} sent {header.kind.name} on edge {header.edge}, which does not come "
                "from it"
            )
        arrival = Arrival(header, peer)
        carried = self._open_envelope(arrival, frame)
        if carried:
            arrival.link = way.link
        with self._plane.lock:
            arrival.abandoned = header.session <= self._left
            if not arrival.abandoned:
                self.inbox.put(arrival)
        if carried:
            way.link.announced(arrival, frame.note, frame.fds)
        elif arrival.abandoned:
            self._answer(arrival)

    @staticmethod
    def _open_envelope(arrival: Arrival, frame: Frame) -> bool:
        """Take what came with the header; True if a transport carries the payload."""
        header = frame.header
        if header.kind is MessageKind.REFUSED:
            arrival.refusal = frame.note.decode(errors="replace")
        elif header.inline:
            arrival.payload = _tensor_of(frame.payload)
        elif header.kind is not MessageKind.NONE:
            return True
        arrival.settled = True
        return False

    def on_settled(self, arrival: Arrival) -> None:
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
            way = self.ways_out[key.edge, Direction.FORWARD, arrival.peer]
            self.release(way, key.session, key.microbatch)
        else:
            # Also where a gradient is due: a NONE would be taken for it, a CREDIT frees a place.
            self.post_credit(arrival.peer, key)

    def post_credit(self, peer: int, key: Key) -> None:
        """Free the place of a message whose gradient, if it takes one, will not come."""
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
        began = time.monotonic()
        self._wait_driving(way, deadline, partial(self._arrived, way, key), key, "nothing came")
        arrived = time.monotonic()
        arrival = self.inbox.get(key)
        if arrival is None:
            raise ProtocolError(f"two receives at once for {key} of edge {way.edge.name!r}")
        if not arrival.settled:
            text = "the payload did not come"
            self._wait_driving(way, deadline, lambda: arrival.settled, key, text)
        with self._plane.lock:
            self.inbox.take(key)
        if arrival.refusal is not None:
            raise RefusedError(
                f"from rank {way.peer}, {key} of edge {way.edge.name!r}: {arrival.refusal}"
            )
        self._count(way, key, arrival, arrived - began, time.monotonic() - arrived)
        return arrival

    def _wait_driving(
        self, way: WayIn, deadline: Deadline, ready: Callable[[], bool], key: Key, what: str
    ) -> None:
        """Wait, and meanwhile finish what the link has begun, if that is the caller's to do.

        Messages before the awaited one must not hold it up: they fill the link.
        """
        link = way.link
        while True:
            if not self._plane.wait(lambda: ready() or link.drivable, deadline):
                raise DeadlineError(self._missing(way, key, deadline, what))
            if ready():
                return
            try:
                link.drive(deadline)
            except StagelinkError as error:
                self._plane.blame(error)
                self._plane.check()
                raise

    def _count(
        self, way: WayIn, key: Key, arrival: Arrival, peer_wait_s: float, wire_wait_s: float
    ) -> None:
        counters, size_bytes = way.counters, arrival.header.payload_bytes
        counters.messages += 1
        counters.payload_bytes += size_bytes
        counters.peer_wait_s += peer_wait_s
        counters.wire_wait_s += wire_wait_s
        if arrival.header.inline:
            counters.inline_messages += 1
        if self._observe is not None:
            self._observe("wait_peer", way.link.link, key, size_bytes, peer_wait_s)
            self._observe("wait_wire", way.link.link, key, size_bytes, wire_wait_s)
            self._observe("recv", way.link.link, key, size_bytes, peer_wait_s + wire_wait_s)

    def here(self, way: WayIn, key: Key) -> bool:
        """Whether a message could be received now without waiting for the peer."""
        with self._plane.lock:
            arrival = self.inbox.get(key)
            return arrival is not None and (arrival.settled or way.link.finishes_in_caller)

    def _arrived(self, way: WayIn, key: Key) -> bool:
        if self.inbox.get(key) is not None:
            return True
        self.check_peer(way.peer, key, partial(self._expected, way, key))
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

    def _event(
        self, name: EventName, link: Link, key: Key, size_bytes: int, seconds: float
    ) -> None:
        if self._observe is not None:
            self._observe(name, link, key, size_bytes, seconds)


def _tensor_of(payload: bytes) -> torch.Tensor:
    if not payload:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
