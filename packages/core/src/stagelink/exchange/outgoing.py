"""Messages on their way out: credit first, then inline or by the link.

This room owns the rule of the windows: what is admitted, what is parked until credit comes, what
gives credit back, and what is flushed when a peer keeps nothing more.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stagelink.control.chain import Awaited
from stagelink.control.connection import Frame
from stagelink.control.framing import encode
from stagelink.deadline import Deadline
from stagelink.errors import DeadlineError, MessageError, ProtocolError, StagelinkError
from stagelink.exchange.sessions import SessionRecord, Sessions
from stagelink.links.arrival import Key
from stagelink.links.node import Node
from stagelink.links.out_link import SendJob
from stagelink.links.route import Observe, OutRoute, Trace
from stagelink.links.window import Window
from stagelink.transport.header import NO_TRACE, Direction, Header, MessageKind

_MAX_TEXT = 10_000
"""Characters of an error's text that a peer is told."""


class Outgoing:
    """Sending side of this rank.

    Args:
        sessions: who can still take it.
        observe: called with each event; None where nobody observes.
        trace: asked for each message's trace context; None: they carry none.
    """

    def __init__(
        self, node: Node, sessions: Sessions, observe: Observe | None, trace: Trace | None
    ) -> None:
        self._plane = plane = node.plane
        self._wiring = node.wiring
        self._sessions = sessions
        self._observe = observe
        self._trace = trace
        self._answering: Counter[int] = Counter()
        plane.handle(MessageKind.CREDIT, self._on_credit)
        plane.goodbyes.on_goodbye(self._flush)
        plane.goodbyes.hold(lambda peer: self._answering[peer] > 0)

    def tell_end(self, session: int, why: str) -> None:
        """Tell every peer that this rank has left a session, and what it is still to get of it."""
        header = Header(MessageKind.END, session=session)
        said: dict[str, object] = {"why": why[:_MAX_TEXT]} if why else {}
        for peer in self._plane.peers:
            routes, due = self._wiring.towards.get(peer, ()), []
            with self._plane.lock:
                for route in routes:
                    if route.window.waiting:
                        due += [(route.edge.index, mb) for mb in route.window.due(session)]
            # On its connection the END comes after every header of what has started: behind the
            # queues. What waits for credit comes later, and the END says which.
            note = encode({**said, "due": due}) if due else encode(said) if said else b""
            chain: Callable[[], None] = partial(self._plane.post, peer, header, note)
            for link in self._wiring.links_to.get(peer, ()):
                chain = partial(link.when_announced, chain)
            chain()

    # -- forward, by credit

    def send_nowait(  # noqa: C901 - no frame more for each message
        self, route: OutRoute, record: SessionRecord, key: Key, job: SendJob, *, copy: bool
    ) -> bool:
        """Send one message if there is credit for it, else do nothing; never waits for a peer.

        With ``copy`` the caller may overwrite the payload as soon as this returns. Raises
        `PeerClosedError` where the peer has left the session or closed, and what an observer does.
        """
        plane, window = self._plane, route.window
        try:
            if plane.reader.ending:
                plane.check()
            plane.reader.last_call_s = time.monotonic()
            if self._trace is not None:
                job.header = job.header._replace(trace=self._trace(route.link.link, job.header))
            payload, peer = job.payload, route.peer
            inline = b"" if payload is None else payload if type(payload) is bytes else None
            with plane.lock:
                if peer in plane.gone or peer in record.ended:
                    self._sessions.check_peer(peer, key, _undelivered(route, window, key))
                if not window.try_admit(key.session, key.microbatch):
                    return False
                if inline is not None:
                    if peer not in plane.goodbyes.said:
                        plane.connections[peer].send(job.header, b"", inline)
                else:
                    window.starting(key.session, key.microbatch)
            if inline is not None:
                job.payload, job.finished = None, True
                counters = route.counters
                counters.messages += 1
                counters.inline_messages += 1
                counters.payload_bytes += job.header.payload_bytes
                if self._observe is not None:
                    self._observe("send", route.link.link, job.header, 0.0, time.monotonic())
            else:
                self._start_admitted(route, window, key, job, copy=copy)
        except BaseException as error:
            # It may have credit, and would never start.
            plane.failure.interrupted(error, foreign=True)
            raise
        return True

    def send(
        self, route: OutRoute, key: Key, job: SendJob, deadline: Deadline, *, copy: bool
    ) -> None:
        """Wait for credit, and send one message for which there was none; as `send_nowait`."""
        window = route.window
        try:
            waited_s = self._wait_credit(route, window, key, deadline)
            self._start_admitted(route, window, key, job, copy=copy, waited_s=waited_s)
        except BaseException as error:
            self._plane.failure.interrupted(error, foreign=True)
            raise

    def park(self, route: OutRoute, key: Key, job: SendJob, *, copy: bool) -> None:
        """Keep one message for which there was no credit, and start it when there is."""
        window = route.window
        try:
            route.link.detach(job, copy=copy)
            start = partial(self._start_admitted, route, window, key, job, copy=False)
            with self._plane.lock:
                # Credit may have come since; then nobody would start what is parked now.
                admitted = self._admit(route, window, key)
                if not admitted:
                    window.park(key.session, key.microbatch, start)
            if admitted:
                start()
        except BaseException as error:
            self._plane.failure.interrupted(error, foreign=True)
            raise

    def _wait_credit(self, route: OutRoute, window: Window, key: Key, deadline: Deadline) -> float:
        began = time.monotonic()
        awaited = Awaited(route.peer, lambda: f"credit for {route.edge.name!r}, {key}")
        if not self._plane.wait(partial(self._admit, route, window, key), deadline, awaited):
            why = self._plane.chain.explain(awaited)
            raise DeadlineError(
                f"rank {self._plane.rank}: no credit for {key} of edge {route.edge.name!r} to "
                f"rank {route.peer} within {deadline.seconds:g} s: the window of {window.size} is "
                f"full of microbatches {window.outstanding()}, which rank {route.peer} has not "
                "answered; credit comes back when the gradient of one has been taken by recv_grad "
                "here, or its tensor by recv there; does each rank follow session.actions?"
                f"{why}"
            )
        waited = time.monotonic() - began
        route.counters.window_wait_s += waited
        return waited

    def _admit(self, route: OutRoute, window: Window, key: Key) -> bool:
        """Take credit if there is some; with the plane's lock held."""
        if self._sessions.lost(route.peer, key):
            self._sessions.check_peer(route.peer, key, _undelivered(route, window, key))
        if not window.try_admit(key.session, key.microbatch):
            return False
        window.starting(key.session, key.microbatch)
        return True

    def _start_admitted(
        self,
        route: OutRoute,
        window: Window,
        key: Key,
        job: SendJob,
        *,
        copy: bool,
        waited_s: float | None = None,
    ) -> None:
        try:
            if waited_s is not None and self._observe is not None:
                now = time.monotonic()
                self._observe("wait_window", route.link.link, job.header, waited_s, now)
            self._start(route, job, copy=copy)
        finally:
            with self._plane.lock:
                window.started(key.session, key.microbatch)
            self._go_on_parting(route.peer)

    def _start(self, route: OutRoute, job: SendJob, *, copy: bool) -> None:
        payload = job.payload
        if payload is None or isinstance(payload, bytes):
            self._plane.post(route.peer, job.header, payload=payload or b"")
            job.payload, job.finished = None, True
            route.counters.inline_messages += 1
        else:
            try:
                route.link.submit(job, copy=copy)
            except StagelinkError as error:
                self._plane.failure.raise_blamed(error, route.peer)
        route.counters.messages += 1
        route.counters.payload_bytes += job.header.payload_bytes
        if self._observe is not None:
            self._observe("send", route.link.link, job.header, 0.0, time.monotonic())

    def _go_on_parting(self, peer: int) -> None:
        if peer in self._plane.gone:  # and waits for the last of what it gets
            self._plane.goodbyes.say(peer)

    # -- credit that comes back

    def release(self, route: OutRoute, session: int, microbatch: int) -> None:
        """A message is answered: give its credit back, and start what was parked for it."""
        with self._plane.lock:
            starts = route.window.release(session, microbatch)
        if starts and self._plane.failure.error is None:  # else nobody takes in what is sent
            for start in starts:
                start()
        self._plane.changed()

    def _flush(self, peer: int) -> None:
        """A peer has said goodbye: what is parked for it goes now, as nothing is kept there."""
        for route in self._wiring.towards.get(peer, ()):
            with self._plane.lock:
                starts = route.window.release_all()
            for start in starts:
                start()

    def check_sent(self, route: OutRoute, header: Header, microbatch: int) -> None:
        """Hold an answer against what waits for one; `ProtocolError` where nothing does."""
        if not route.window.holds(header.session, microbatch):
            raise ProtocolError(
                f"rank {route.peer}: {header.kind.name} for microbatch {microbatch} (session "
                f"{header.session}) of edge {route.edge.name!r}, which holds no credit: it was "
                "not sent, or has been answered"
            )

    def _on_credit(self, peer: int, frame: Frame) -> None:
        header, note = frame.header, frame.note
        route = self._wiring.out.get((header.edge, Direction.FORWARD, peer))
        if route is None:
            raise ProtocolError(
                f"rank {peer}: CREDIT for edge {header.edge}, which does not go there"
            )
        self.check_sent(route, header, header.microbatch)
        self.release(route, header.session, header.microbatch)
        if not note:
            return
        if len(note) % _MICROBATCH.size:
            raise ProtocolError(f"rank {peer}: CREDIT with a note of {len(note)} bytes")
        for (microbatch,) in _MICROBATCH.iter_unpack(note):
            self.check_sent(route, header, microbatch)
            self.release(route, header.session, microbatch)

    def give_credit(self, edge: int, peer: int, session: int, microbatch: int, *more: int) -> None:
        """Tell a peer that it may send as many messages more as are answered by this."""
        header = tuple.__new__(
            Header,
            (MessageKind.CREDIT, Direction.BACKWARD, 0, session, edge, microbatch,
             0, 0, 0, 0, 0, 0, (), NO_TRACE),
        )  # fmt: skip
        note = b"".join(map(_MICROBATCH.pack, more)) if more else b""
        self._plane.connections[peer].send(header, note)

    # -- back, without credit

    def answer(
        self, route: OutRoute, key: Key, job: SendJob, owed: dict[int, Any], *, copy: bool
    ) -> None:
        """Send a gradient, unless its peer has said goodbye and nobody asks for it there.

        It is taken off what is ``owed`` when no plugin can refuse it any more.
        """
        plane, peer = self._plane, route.peer
        try:
            if plane.reader.ending:
                plane.check()
            plane.reader.last_call_s = time.monotonic()
            if self._trace is not None:
                job.header = job.header._replace(trace=self._trace(route.link.link, job.header))
            del owed[key.microbatch]
            if route.answers is not None:
                route.answers.window.free((key.session, key.microbatch))
            with plane.lock:
                wanted = peer not in plane.gone
                self._answering[peer] += wanted
            if not wanted:
                job.payload = None
                job.finished = True
                return
            try:
                self._start(route, job, copy=copy)
            finally:
                with plane.lock:
                    self._answering[peer] -= 1
                self._go_on_parting(peer)
        except BaseException as error:
            plane.failure.interrupted(error, foreign=True)
            raise

    # -- both

    def wait_sent(self, sent: Sequence[tuple[OutRoute, SendJob]], deadline: Deadline) -> None:
        """Block until the memory of what was sent is the caller's again, or `DeadlineError`.

        `PeerClosedError` where a receiver has gone before it got what was sent to it.
        """

        def finished(route: OutRoute, job: SendJob) -> bool:
            return job.finished or self._plane.goodbyes.check_reached(
                route.peer, f"room for {route.edge.name!r} of microbatch {job.header.microbatch}"
            )

        if not self._plane.wait(lambda: all(finished(*one) for one in sent), deadline):
            raise DeadlineError(
                f"rank {self._plane.rank}: a message was still in flight after "
                f"{deadline.seconds:g} s"
            )

    def refused(self, routes: Sequence[OutRoute], key: Key, error: MessageError) -> MessageError:
        """Tell the peers that a message cannot be sent, and why; it takes no credit.

        Returns the error for the caller, with the same text.
        """
        text = f"rank {self._plane.rank}: {key} of edge {routes[0].edge.name!r}: {error}"
        header = Header(
            MessageKind.REFUSED, key.direction, session=key.session, microbatch=key.microbatch
        )
        for route in routes:
            own = header._replace(edge=route.edge.index)
            self._plane.post(route.peer, own, text[:_MAX_TEXT].encode())
        return type(error)(text)


def _undelivered(route: OutRoute, window: Window, key: Key) -> str:
    lost = window.outstanding(key.session)
    those = "1 earlier message" if len(lost) == 1 else f"{len(lost)} earlier messages"
    return (
        f"{key} of edge {route.edge.name!r} was not sent, and {those} of this edge "
        f"{'is' if len(lost) == 1 else 'are'} still unacknowledged"
        f"{f' (microbatches {lost})' if lost else ''}"
    )


_MICROBATCH = struct.Struct("<q")
