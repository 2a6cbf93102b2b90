"""Opening of a plan's links: who is connected, by which transport, and the links' ends."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from stagelink.control.connection import Frame
from stagelink.control.meeting import wait_for_ranks
from stagelink.control.plane import Plane
from stagelink.control.rendezvous import Rendezvous
from stagelink.deadline import Deadline
from stagelink.errors import (
    ClosedError,
    PeerClosedError,
    ProtocolError,
    StagelinkError,
    TransportError,
)
from stagelink.links.agreement import Choices
from stagelink.links.bound import Bound
from stagelink.links.in_link import InLink
from stagelink.links.link_end import LinkEnd
from stagelink.links.out_link import OutLink
from stagelink.links.port import LinkPort, Services, other_end, post_for
from stagelink.links.route import InRoute, OutRoute, RouteKey
from stagelink.plan import Edge, Plan
from stagelink.transport.buffers import BufferPool
from stagelink.transport.contract import Link, Receiver, Sender, Transport
from stagelink.transport.events import LinkCounters
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.streams import HostStream


class Wiring:
    """The links of one rank.

    Args:
        on_ready: called with each peer that has opened, or begins to open, its links with this
            rank; None: `open` waits for all of them.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        plane: Plane,
        pool: BufferPool,
        rendezvous: Rendezvous,
        on_ready: Callable[[int], None] | None = None,
    ) -> None:
        self.rank = rank
        self.plane = plane
        self.pool = pool
        self.rendezvous = rendezvous
        self.out: dict[RouteKey, OutRoute] = {}  # the routes that begin here
        self.into: dict[RouteKey, InRoute] = {}  # the routes that end here
        # the routes that begin here, by peer
        self.towards: defaultdict[int, list[OutRoute]] = defaultdict(list)
        # the links that carry those, by peer
        self.links_to: defaultdict[int, set[OutLink]] = defaultdict(set)
        self.counters: dict[Link, LinkCounters] = {}  # totals per link
        # whether it is their receivers' doing that `drain` left messages behind
        self.receivers_closed = False
        self._plan = plan
        self._windows: Counter[Link] = Counter()
        self._begun_with: Sequence[int] = ()
        self._ends: dict[Link, LinkEnd[Any]] = {}
        self._numbered: dict[int, list[Link]] = {}
        self._openers: list[threading.Thread] = []
        self._bound = Bound.of(plan.limits)
        self._opening: set[int] = set()
        self._ready: set[int] = set()
        self._tell_ready = self._ready.add if on_ready is None else on_ready
        plane.handle(MessageKind.NOTE, self._on_note)
        plane.handle(MessageKind.READY, self._on_ready)
        plane.failure.on_failure(self._on_failure)
        plane.goodbyes.hold(self._busy)
        plane.goodbyes.on_ended(self._on_ended)

    # -- building and opening

    def enter(self, windows: Sequence[int]) -> None:
        """A session begins; per edge, the most messages in flight between two ranks."""
        found: Counter[Link] = Counter()
        routes: tuple[OutRoute | InRoute, ...] = (*self.out.values(), *self.into.values())
        for route in routes:
            found[route.link.link] += windows[route.edge.index]
        self._windows |= found  # the greater of both, link by link

    def begin(self, session: int, windows: Sequence[int]) -> None:
        """A session begins, whose windows hold from now on; with the plane's lock held.

        Raises `ProtocolError` where a peer has sent more than its window allows.
        """
        for into in self.into.values():
            into.window.enter(session, windows[into.edge.index])
        if windows is not self._begun_with:  # else they are what they were in the last session
            self._begun_with = windows
            for out in self.out.values():
                out.window.size = windows[out.edge.index]
            self.enter(windows)

    def lift(self) -> None:
        """Lift the windows of messages to this rank: peers may send whatever is left."""
        for route in self.into.values():
            route.window.lift()

    def open(self, transports: Mapping[str, Transport], deadline: Deadline) -> None:
        """Open both directions of every link; the pairs of ranks do so side by side.

        Returns when the peers have opened theirs, too: a rank that fails or closes at once must
        not tear down what a peer is still opening. Raises where a transport cannot open its end
        (`TransportError`), or the deadline passes (`ConnectError`).
        """
        for peer in self._numbered:
            self.open_pair(peer, transports, deadline)
        self._wait_for("open links", lambda: self._opening, deadline)
        for peer in self.plane.peers:
            self.plane.post(peer, Header(MessageKind.READY))
        peers = frozenset(self.plane.peers)
        self._wait_for("word that its links are open", lambda: peers - self._ready, deadline)

    def _wait_for(
        self, step: str, absent: Callable[[], Collection[int]], deadline: Deadline
    ) -> None:
        wait_for_ranks(self.plane, self.rendezvous, step, absent, deadline)

    def open_pair(
        self, peer: int, transports: Mapping[str, Transport], deadline: Deadline
    ) -> None:
        """Begin to open the links with one peer, which does the same; returns at once."""
        opener = partial(self._open_pair, peer, transports, deadline)
        name = f"stagelink-open-{self.rank}-{peer}"
        thread = threading.Thread(target=opener, name=name, daemon=True)
        with self.plane.lock:
            self._opening.add(peer)
            self._openers.append(thread)  # first: a signal may end the start, and close waits
            thread.start()

    def _on_ready(self, peer: int, frame: Frame) -> None:
        del frame
        self._tell_ready(peer)

    def build(self, transports: Mapping[str, Transport], choices: Choices) -> None:
        """Make this rank's end of every link and route; nothing is opened yet."""
        for (edge_index, source, target), choice in choices.items():
            edge, grad = self._plan.edges[edge_index], self._plan.edges[edge_index].tensor.grad
            transport = transports[choice.transport]
            back = Link(target, source, choice.transport, choice.link.device)
            if source == self.rank:
                sent = self._out_route(edge, choice.link, transport)
                if grad:
                    self._in_route(edge, back, transport, sent)
            else:
                received = self._in_route(edge, choice.link, transport)
                if grad:
                    self._out_route(edge, back, transport, received)
        self._number_links()

    def _out_route(
        self, edge: Edge, link: Link, transport: Transport, answers: InRoute | None = None
    ) -> OutRoute:
        peer, end = link.target, self._ends.get(link)
        if not isinstance(end, OutLink):
            announce = partial(post_for, self.plane, link, peer)
            progress = partial(self._on_progress, peer)
            fail = partial(self.plane.failure.blame, peer=peer)
            stream = transport.stream(link) or HostStream(self.pool.take)
            end = OutLink(link, transport.capabilities, announce, stream, progress, fail)
            self._ends[link] = end
        counters = self.counters.setdefault(link, LinkCounters())
        route = OutRoute(edge, peer, end, counters, answers)
        self.out[edge.index, route.direction, peer] = route
        self.towards[peer].append(route)
        self.links_to[peer].add(end)
        return route

    def _in_route(
        self, edge: Edge, link: Link, transport: Transport, answers: OutRoute | None = None
    ) -> InRoute:
        peer, end = link.source, self._ends.get(link)
        if not isinstance(end, InLink):
            fail = partial(self.plane.failure.blame, peer=peer)
            stream = transport.stream(link) or HostStream(self.pool.take)
            changed = self.plane.changed
            end = InLink(link, transport.capabilities, stream, self._bound, changed, fail)
            self._ends[link] = end
        counters = self.counters.setdefault(link, LinkCounters())
        route = InRoute(edge, peer, end, counters, answers)
        self.into[edge.index, route.direction, peer] = route
        return route

    def _number_links(self) -> None:
        by_peer: defaultdict[int, list[Link]] = defaultdict(list)
        for link in self._ends:
            by_peer[other_end(link, self.rank)].append(link)
        for peer, links in by_peer.items():
            links.sort(key=lambda link: (link.source, link.target, link.transport, link.device))
            self._numbered[peer] = links

    def _open_pair(
        self, peer: int, transports: Mapping[str, Transport], deadline: Deadline
    ) -> None:
        try:
            for number, link in enumerate(self._numbered[peer]):
                self._open_end(number, link, transports[link.transport], deadline)
        except (ClosedError, PeerClosedError):
            pass  # no failure; callers that wait for the peer are told so
        except StagelinkError as error:
            self.plane.failure.blame(error)
        except Exception as error:
            failure = TransportError(
                f"rank {self.rank} cannot open its links with rank {peer}: "
                f"{type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self.plane.failure.blame(failure)
        with self.plane.lock:
            self._opening.remove(peer)
        self.plane.changed()

    def _open_end(self, number: int, link: Link, transport: Transport, deadline: Deadline) -> None:
        end = self._ends[link]
        core = Services(self.plane, self.rendezvous, self.pool, self.window_of)
        port = LinkPort(core, link, end, number)
        with end.stream.entered():
            if isinstance(end, OutLink):
                sender: object = transport.open_sender(link, port, deadline)
                if not isinstance(sender, Sender):
                    raise TransportError(f"{link}: open_sender gives {sender!r}, no Sender")
                end.opened(sender)
            elif isinstance(end, InLink):
                receiver: object = transport.open_receiver(link, port, deadline)
                if not isinstance(receiver, Receiver):
                    raise TransportError(f"{link}: open_receiver gives {receiver!r}, no Receiver")
                end.opened(receiver)

    # -- running and closing

    def _on_note(self, peer: int, frame: Frame) -> None:
        links = self._numbered.get(peer, [])
        number = frame.header.link
        if number >= len(links):
            raise ProtocolError(
                f"a note for link {number} with rank {peer}, which has {len(links)}"
            )
        self._ends[links[number]].note(frame.note, frame.take_fds())

    def _on_progress(self, peer: int) -> None:
        """Something has reached a peer; if it has said goodbye, it may wait for the last of it."""
        if peer in self.plane.gone:
            self.plane.goodbyes.say(peer)
        self.plane.changed()

    def _busy(self, peer: int) -> bool:
        """Whether a peer that is here is still to get something."""
        return peer not in self.plane.goodbyes.ended and any(map(_unsent, self.towards[peer]))

    def _on_ended(self, peer: int) -> None:
        cause = PeerClosedError(f"rank {self.rank}: peer rank {peer} {self.plane.gone[peer]}")
        for end in self._ends.values():
            if isinstance(end, OutLink) and end.link.target == peer:
                end.end_peer(cause)

    def _on_failure(self, cause: StagelinkError) -> None:
        for end in self._ends.values():
            end.abort(cause)

    def window_of(self, link: Link) -> int:
        """Limit of unacknowledged messages of a link, over all its edges."""
        return self._windows[link]

    @property
    def links(self) -> tuple[Link, ...]:
        """Every link that begins or ends here."""
        return tuple(self._ends)

    def drain(self, deadline: Deadline) -> dict[Link, int]:
        """Wait until all that was sent is through, here and at the peers, or these are gone.

        Each peer is told goodbye when nothing is left for it; and what it has queued for this
        rank is received until it says so, too. Returns how many messages could not be delivered,
        of the links that have some.
        """
        self.plane.wait(self._drained, deadline, closing=True)
        lost = Counter(
            {link: end.unfinished for link, end in self._ends.items() if isinstance(end, OutLink)}
        )
        for route in self.out.values():
            lost[route.link.link] += route.window.waiting
        # Not later: this rank's own goodbye, when time is up, may be why a peer closes.
        self.receivers_closed = all(link.target in self.plane.goodbyes.ended for link in +lost)
        return dict(+lost)

    def _drained(self) -> bool:
        plane = self.plane
        parted = [plane.goodbyes.say(peer) for peer in plane.peers]  # all of them, now
        return all(parted) and all(
            peer in plane.gone and self._taken_in(peer) for peer in plane.peers
        )

    def _taken_in(self, peer: int) -> bool:
        """Whether nothing of a peer that is gone is still coming in."""
        ends = (end for end in self._ends.values() if isinstance(end, InLink))
        return all(not end.unfinished or end.idle for end in ends if end.link.source == peer)

    def close(self, deadline: Deadline) -> None:
        """Give every end back, also where one raises; what is still being opened is waited for."""
        with self.plane.lock:
            openers = tuple(self._openers)
        for opener in openers:
            if opener.is_alive():  # else it has ended, or a signal came before its start
                opener.join(deadline.remaining_s)
        with ExitStack() as ends:
            for end in self._ends.values():
                ends.callback(end.close, deadline)


def _unsent(route: OutRoute) -> bool:
    return bool(route.link.unfinished or route.window.waiting)
