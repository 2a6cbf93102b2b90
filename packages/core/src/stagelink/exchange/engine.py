"""The moving parts of one rank of a pipeline: messages, sessions and reductions over its links."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from stagelink.control.reduce import Reducer, spanning_tree
from stagelink.deadline import Deadline
from stagelink.errors import StagelinkError
from stagelink.exchange.endings import Endings
from stagelink.exchange.mail import Mail
from stagelink.exchange.opening import Openings
from stagelink.links.joint import Joint
from stagelink.links.topology import followers_of, siblings_of
from stagelink.links.ways import Ways
from stagelink.transport.events import Event

if TYPE_CHECKING:
    from stagelink.control.rendezvous import Rendezvous
    from stagelink.plan import Plan
    from stagelink.plugins.offers import Survey
    from stagelink.plugins.plugins import Plugins
    from stagelink.schedule import Verification
    from stagelink.transport.contract import Link
    from stagelink.transport.events import EventName
    from stagelink.transport.header import Header

__all__ = ["Engine"]

logger = logging.getLogger("stagelink")


class Engine(Joint):
    """Everything that `Handler` drives.

    Args:
        plan: the plan.
        rank: this rank.
        plugins: the transports and observers of this handler.
        rendezvous: the job's store.
        hosts_store: whether this process must outlast the others for it.

    Attributes:
        mail: the messages.
        openings: how sessions are agreed on.
        reducer: small values over all ranks.
        on_close: called, in order, when this rank is closed; each must return at once.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        plugins: Plugins,
        rendezvous: Rendezvous,
        *,
        hosts_store: bool,
    ) -> None:
        super().__init__(plan, rank, plugins, rendezvous, hosts_store=hosts_store)
        self.on_close: list[Callable[[], None]] = []
        self._leaving = threading.Lock()
        observe = self._observe if plugins.hooks.wants_events else None
        trace = self._trace if plugins.hooks.gives_traces else None
        endings = Endings(self.plane, followers_of(plan, rank), siblings_of(plan, rank))
        self.mail = Mail(self.plane, plan.control.inline_bytes, observe, trace, endings)
        self.mail.into.most_bytes = plan.limits.receive_bytes
        self.openings = Openings(self.plane, plan)
        self.reducer = Reducer(self.plane, spanning_tree(self._neighbours, rank))
        self.wire(Ways(self.mail.out.ways, self.mail.into.ways))

    def join(self, found: Survey, verification: Verification, deadline: Deadline) -> None:
        """Meet every peer, agree on transports, open the links; see `stagelink.connect`."""
        self.meet(found, deadline)
        windows = [*map(max, verification.windows, verification.forward_windows)]
        self.wiring.enter(windows)
        self.wiring.open(found.transports, deadline)
        self.tell_opened()

    def leave(self, error: BaseException | None, why: str = "its process ended") -> None:
        """Close what nobody has closed; its peers hear so, and with what error where one ended it.

        Args:
            error: that ended it, or None.
            why: it is left, for the peers and for the log.
        """
        if self.plane.failure.forked:
            return
        with self._leaving:  # the end of the process waits for one that is under way
            if self.plane.start_closing():
                self._leave(error, why)

    def _leave(self, error: BaseException | None, why: str) -> None:
        left = f"left without close: {why}"
        logger.warning(
            "rank %d: %s; open it in a `with` block, or call its close()", self.rank, left
        )
        if error is not None:
            self.abandon(error)
            return
        self.plane.farewell = left
        try:
            lost = self.close(Deadline(self.plan.limits.close_deadline_s))
        except StagelinkError as another:
            logger.warning("rank %d: while it was left: %s", self.rank, another)
        else:
            for link, count in lost.items():
                logger.warning("rank %d: left with %d not delivered on %s", self.rank, count, link)

    def let_go(self) -> None:
        """See `Joint.let_go`."""
        for action in self.on_close:
            action()
        self.mail.abandon()

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
        self._plugins.hooks.event(event)

    def _trace(self, link: Link, header: Header) -> bytes:
        return self._plugins.hooks.trace(link, self.plan.edges[header.edge].name, header)
