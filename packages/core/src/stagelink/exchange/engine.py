"""The moving parts of one rank of a pipeline: messages, sessions and reductions over its links."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from stagelink.control.reduce import Reducer, spanning_tree
from stagelink.deadline import Deadline
from stagelink.errors import PluginError, ProtocolError, StagelinkError
from stagelink.exchange.envelope import Terms
from stagelink.exchange.incoming import Incoming, Received
from stagelink.exchange.outgoing import Outgoing
from stagelink.exchange.routing import RoutingTable
from stagelink.exchange.sessions import Sessions
from stagelink.links.node import Node
from stagelink.links.topology import neighbours
from stagelink.plugins.offers import Survey
from stagelink.schedule import Mode, Verification
from stagelink.transport.contract import Link
from stagelink.transport.events import Event, EventName
from stagelink.transport.header import Header
from stagelink.transport.streams import device_here

logger = logging.getLogger("stagelink")


class Engine:
    """Everything that `Handler` drives: messages, sessions, routes and reductions of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.plan, self.rank = plan, rank = node.plan, node.rank
        self.plane = plane = node.plane
        self._leaving = threading.Lock()
        observe = self._observe if node.hooks.wants_events else None
        trace = self._trace if node.hooks.gives_traces else None
        self.sessions = Sessions(plane, plan)
        self.out = Outgoing(node, self.sessions, observe, trace)
        self.into = Incoming(node, self.sessions, self.out, observe)
        self.table = RoutingTable(plan, rank, node.wiring)
        inline_bytes, device = plan.control.inline_bytes, device_here(plan.stage_of(rank).device)
        self.terms: dict[Mode, Terms] = {  # what messages of a session have in common
            "train": Terms(True, inline_bytes, device, device.type == "cpu"),
            "evaluate": Terms(False, inline_bytes, device, device.type == "cpu"),
        }
        self.reducer = Reducer(plane, spanning_tree(neighbours(plan), rank))
        node.on_close.append(self._abandon_messages)

    def join(self, found: Survey, verification: Verification, deadline: Deadline) -> None:
        """Meet every peer, agree on transports, open the links; see `stagelink.connect`."""
        self.node.meet(found, deadline)
        windows = [*map(max, verification.windows, verification.forward_windows)]
        self.node.wiring.enter(windows)
        self.node.wiring.open(found.transports, deadline)
        self.node.tell_opened()

    def leave(self, error: BaseException | None, why: str = "its process ended") -> None:
        """Close what nobody has closed; peers hear why, and with what error if one ended it."""
        if self.plane.failure.forked:
            return
        with self._leaving:  # the end of the process waits for one that has begun
            if self.plane.start_closing():
                self._leave(error, why)

    def _leave(self, error: BaseException | None, why: str) -> None:
        left = f"left without close: {why}"
        logger.warning(
            "rank %d: %s; open it in a `with` block, or call its close()", self.rank, left
        )
        if error is not None:
            self.node.abandon(error)
            return
        self.plane.goodbyes.farewell = left
        try:
            lost = self.node.close(Deadline(self.plan.limits.close_deadline_s))
        except StagelinkError as another:
            logger.warning("rank %d: while it was left: %s", self.rank, another)
        else:
            for link, count in lost.items():
                logger.warning("rank %d: left with %d not delivered on %s", self.rank, count, link)

    # -- sessions

    def enter_session(self, number: int, windows: Sequence[int]) -> None:
        """A session begins, with windows of these sizes by edge.

        Raises:
            ProtocolError: a peer has sent more than its window allows.
        """
        try:
            with self.plane.lock:
                self.node.wiring.begin(number, windows)
        except ProtocolError as error:
            # Without the lock: a failure aborts transports, and their threads may wait for it.
            self.plane.failure.fail(error)
            self.plane.check()

    def leave_session(
        self, number: int, owed: Sequence[Received], why: str, *, tells: bool
    ) -> None:
        """A session ends: tell the peers, answer what nobody will ask for, wait for nobody.

        Args:
            number: the session's.
            owed: what was received and not answered.
            why: the error that ended it, for the peers; empty where none did.
            tells: whether to tell them, since one may wait for what will not come.
        """
        if self.plane.failure.forked:
            return
        if tells:  # before any answer: with credit a sender goes on, and loses what it sends
            self.out.tell_end(number, why)
        with self.plane.lock:
            self.sessions.leave(number)
            unread = self.into.inbox.take_session(number)
        self.into.drop(unread, owed)

    def _abandon_messages(self) -> None:
        """The handler is being closed: nobody will ask for what is here, nor for what comes."""
        with self.plane.lock:
            self.sessions.close()
            self.node.wiring.lift()
            unread = self.into.inbox.clear()
        self.into.drop(unread)

    # -- observers

    def _observe(
        self, name: EventName, link: Link, header: Header, seconds: float, ended_s: float
    ) -> None:
        event = Event(
            name,
            link,
            self.plan.edges[header.edge].name,
            header.direction,
            header.microbatch,
            header.session,
            header.payload_bytes,
            seconds,
            ended_s,
            header.trace,
        )
        try:
            self.node.hooks.event(event)
        except PluginError as error:  # what it is told of may be half done
            self.plane.fail(error)
            raise

    def _trace(self, link: Link, header: Header) -> bytes:
        return self.node.hooks.trace(link, self.plan.edges[header.edge].name, header)
