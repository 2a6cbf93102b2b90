"""Messages on their way out: a place in the window first, then inline or by the link."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from stagelink.control.chain import Awaited
from stagelink.control.framing import encode
from stagelink.errors import DeadlineError, ProtocolError, StagelinkError
from stagelink.transport.header import Direction, Header, MessageKind

if TYPE_CHECKING:
    from stagelink.control.connection import Frame
    from stagelink.control.plane import Plane
    from stagelink.deadline import Deadline
    from stagelink.exchange.presence import Presence
    from stagelink.links.arrival import Key
    from stagelink.links.out_link import OutLink, SendJob
    from stagelink.links.ways import Observe, Trace, WayOut
    from stagelink.links.window import Window
    from stagelink.plan import Edge
    from stagelink.transport.events import EventName

__all__ = ["Outgoing"]

_MAX_TEXT = 10_000
"""Characters of an error's text that a peer is told."""


class Outgoing:
    """What this rank sends.

    Args:
        plane: this rank's control plane.
        presence: who can still take it.
        inline_bytes: payloads up to this size travel in the header's frame.
        observe: called with each event; None where nobody observes.
        trace: asked for each message's trace context; None: they carry none.

    Attributes:
        inline_bytes: as given.
        ways: by (edge index, direction, peer).
        on_answer: called with the peer and the key of each gradient before it is sent.
    """

    def __init__(
        self,
        plane: Plane,
        presence: Presence,
        inline_bytes: int,
        observe: Observe | None,
        trace: Trace | None,
    ) -> None:
        self.inline_bytes = inline_bytes
        self._plane = plane
        self._presence = presence
        self._observe = observe
        self._trace = trace
        self.on_answer: Callable[[int, Key], None] = lambda peer, key: None
        self.ways: dict[tuple[int, Direction, int], WayOut] = {}
        self._answering: Counter[int] = Counter()
        plane.handle(MessageKind.CREDIT, self._on_credit)
        plane.on_goodbye(self._flush)
        plane.hold_goodbye(lambda peer: self._answering[peer] > 0)

    def enter(self, window_of: Callable[[Edge], int]) -> None:
        """A session begins: its windows' sizes hold from now on; with the plane's lock held."""
        for way in self.ways.values():
            if way.window is not None:
                way.window.size = window_of(way.edge)

    def tell_end(self, session: int, why: str) -> None:
        """Tell every peer that this rank has left a session, and what it is still to get of it."""
        links: dict[int, set[OutLink]] = {peer: set() for peer in self._plane.peers}
        due: dict[int, list[tuple[int, int]]] = {peer: [] for peer in links}
        with self._plane.lock:
            for way in self.ways.values():
                links[way.peer].add(way.link)
                if way.window is not None:
                    index = way.edge.index
                    due[way.peer] += [(index, mb) for mb in way.window.due(session)]
        for peer, outs in links.items():
            header = Header(MessageKind.END, session=session)
            # On its connection the END comes after every header of what has started: behind the
            # queues. What waits for a place comes later, and the END says which.
            said: dict[str, object] = {"why": why[:_MAX_TEXT]} if why else {}
            if due[peer]:
                said["due"] = due[peer]
            note = encode(said) if said else b""
            chain: Callable[[], None] = partial(self._plane.post, peer, header, note)
            for link in outs:
                chain = partial(link.when_announced, chain)
            chain()

    def send(
        self,
        way: WayOut,
        key: Key,
        job: SendJob,
        *,
        copy: bool,
        deadline: Deadline | None,
    ) -> bool:
        """Send one message when the window has a place for it.

        Args:
            way: where to.
            key: what it is.
            job: its header and payload.
            copy: the caller may overwrite the payload as soon as this returns.
            deadline: for the place; None: do not wait, start it when a place is free.

        Returns:
            Whether it waited for an answer of the peer, and got one.

        Raises:
            DeadlineError: no place came free.
            PeerClosedError: the peer has left the session or closed.
            StagelinkError: the handler failed or was closed, or an observer failed.
        """
        try:
            return self._send(way, key, job, copy=copy, deadline=deadline)
        except BaseException as error:
            self._plane.failure.interrupted(error)  # it may have a place, and would never start
            raise

    def _send(
        self, way: WayOut, key: Key, job: SendJob, *, copy: bool, deadline: Deadline | None
    ) -> bool:
        self._plane.check()
        self._plane.reader.touch()
        if self._trace is not None:
            job.header = job.header._replace(trace=self._trace(way.link.link, job.header))
        window = way.window
        waits = not (window is None or self._place_now(way, window, key))
        if window is None:
            self.on_answer(way.peer, key)
            self._answer(way, job, copy=copy)
        elif not waits:
            self._start_admitted(way, window, key, job, copy=copy)
        elif deadline is None:
            self._park(way, window, key, job, copy=copy)
        else:
            waited_s = self._wait_place(way, window, key, deadline)
            self._start_admitted(way, window, key, job, copy=copy, waited_s=waited_s)
        return waits and deadline is not None

    def _wait_place(self, way: WayOut, window: Window, key: Key, deadline: Deadline) -> float:
        began = time.monotonic()
        awaited = Awaited(way.peer, lambda: f"a place for {way.edge.name!r}, {key}")
        if not self._plane.wait(partial(self._place_now, way, window, key), deadline, awaited):
            why = self._plane.chain.explain(awaited)
            raise DeadlineError(
                f"rank {self._plane.rank}: no place for {key} of edge {way.edge.name!r} to rank "
                f"{way.peer} within {deadline.seconds:g} s: the window of {window.size} is taken "
                f"by microbatches {window.outstanding()}, which rank {way.peer} has not answered; "
                "a place is free again when its gradient has been taken by recv_grad here, or its "
                f"tensor by recv there; does each rank follow session.actions?{why}"
            )
        waited = time.monotonic() - began
        way.counters.window_wait_s += waited
        return waited

    def _place_now(self, way: WayOut, window: Window, key: Key) -> bool:
        with self._plane.lock:
            if self._presence.lost(way.peer, key):
                self._presence.check_peer(way.peer, key, self._undelivered(way, window, key))
            if window.open:
                window.admit(key.session, key.microbatch)
                return True
            return False

    @staticmethod
    def _undelivered(way: WayOut, window: Window, key: Key) -> str:
        lost = window.outstanding(key.session)
        those = "1 earlier message" if len(lost) == 1 else f"{len(lost)} earlier messages"
        return (
            f"{key} of edge {way.edge.name!r} was not sent, and {those} of this edge "
            f"{'is' if len(lost) == 1 else 'are'} still unacknowledged"
            f"{f' (microbatches {lost})' if lost else ''}"
        )

    def _park(self, way: WayOut, window: Window, key: Key, job: SendJob, *, copy: bool) -> None:
        way.link.detach(job, copy=copy)
        start = partial(self._start_admitted, way, window, key, job, copy=False)
        with self._plane.lock:
            # A place may have come free since; then nobody would start what is parked now.
            place = self._place_now(way, window, key)
            if not place:
                window.park(key.session, key.microbatch, start)
        if place:
            start()

    def _answer(self, way: WayOut, job: SendJob, *, copy: bool) -> None:
        """Start a gradient, unless its peer has said goodbye and nobody asks for it there."""
        with self._plane.lock:
            wanted = way.peer not in self._plane.gone
            self._answering[way.peer] += wanted
        if not wanted:
            job.payload = None
            job.finished = True
            return
        try:
            self._start(way, job, copy=copy)
        finally:
            with self._plane.lock:
                self._answering[way.peer] -= 1
            self._go_on_parting(way.peer)

    def _go_on_parting(self, peer: int) -> None:
        if peer in self._plane.gone:  # and waits for the last of what it gets
            self._plane.part(peer)

    def _start_admitted(
        self,
        way: WayOut,
        window: Window,
        key: Key,
        job: SendJob,
        *,
        copy: bool,
        waited_s: float | None = None,
    ) -> None:
        try:
            if waited_s is not None:
                self._event("wait_window", way, job.header, waited_s)
            self._start(way, job, copy=copy)
        finally:
            with self._plane.lock:
                window.started(key.session, key.microbatch)
            self._go_on_parting(way.peer)

    def _flush(self, peer: int) -> None:
        """A peer has said goodbye: what is parked for it goes now, as nothing is kept there."""
        for way in self.ways.values():
            if way.peer == peer and way.window is not None:
                with self._plane.lock:
                    starts = way.window.release_all()
                for start in starts:
                    start()

    def _start(self, way: WayOut, job: SendJob, *, copy: bool) -> None:
        payload = job.payload
        if not isinstance(payload, torch.Tensor):
            self._plane.post(way.peer, job.header, payload=payload or b"")
            job.payload = None
            job.finished = True
            way.counters.inline_messages += 1
        else:
            try:
                way.link.submit(job, copy=copy)
            except StagelinkError as error:
                self._plane.failure.raise_blamed(error, way.peer)
        way.counters.messages += 1
        way.counters.payload_bytes += job.header.payload_bytes
        self._event("send", way, job.header, 0.0)

    def wait_sent(self, sent: Sequence[tuple[WayOut, SendJob]], deadline: Deadline) -> None:
        """Block until the memory of what was sent is the caller's again.

        Raises:
            DeadlineError: it took longer.
            PeerClosedError: a receiver has gone before it got what was sent to it.
        """

        def finished(way: WayOut, job: SendJob) -> bool:
            return job.finished or self._plane.check_reached(
                way.peer, f"room for {way.edge.name!r} of microbatch {job.header.microbatch}"
            )

        if not self._plane.wait(lambda: all(finished(*one) for one in sent), deadline):
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
        self._plane.post(way.peer, header, text[:_MAX_TEXT].encode())

    def release(self, way: WayOut, session: int, microbatch: int) -> None:
        """A message is answered: free its place, and start what was parked for it."""
        if way.window is None:
            return
        with self._plane.lock:
            starts = way.window.release(session, microbatch)
        if self._plane.failure.error is None:  # else nobody takes in what is sent
            for start in starts:
                start()
        self._plane.changed()

    def check_sent(self, way: WayOut, header: Header) -> None:
        """Hold an answer against what waits for one.

        Raises:
            ProtocolError: there was nothing to answer.
        """
        window = way.window
        if window is None or not window.holds(header.session, header.microbatch):
            raise ProtocolError(
                f"rank {way.peer}: {header.kind.name} for microbatch {header.microbatch} (session "
                f"{header.session}) of edge {way.edge.name!r}, which has no place in the window: "
                "it was not sent, or has been answered"
            )

    def _on_credit(self, peer: int, frame: Frame) -> None:
        header = frame.header
        way = self.ways.get((header.edge, Direction.FORWARD, peer))
        if way is None:
            raise ProtocolError(
                f"rank {peer}: CREDIT for edge {header.edge}, which does not go there"
            )
        self.check_sent(way, header)
        self.release(way, header.session, header.microbatch)

    def _event(self, name: EventName, way: WayOut, header: Header, seconds: float) -> None:
        if self._observe is not None:
            self._observe(name, way.link.link, header, seconds, time.monotonic())
