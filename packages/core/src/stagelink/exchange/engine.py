"""The moving parts of one rank: how they are put together, joined with the others', and ended."""

from __future__ import annotations

import json
import logging
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from stagelink.control.meeting import Meeting
from stagelink.control.plane import Plane
from stagelink.control.reduce import Reducer, spanning_tree
from stagelink.errors import AbortedError, DisagreementError, StagelinkError
from stagelink.exchange.endings import Endings
from stagelink.exchange.link_end import give_back
from stagelink.exchange.mail import Mail
from stagelink.exchange.opening import Openings
from stagelink.exchange.topology import followers_of, neighbours, siblings_of
from stagelink.exchange.watch import AbortWatch
from stagelink.exchange.wiring import Wiring
from stagelink.plan import differences
from stagelink.transport.buffers import BufferPool
from stagelink.transport.choice import asker
from stagelink.transport.contract import Deadline
from stagelink.transport.events import Event
from stagelink.transport.host import process_id, server_id
from stagelink.transport.offers import End, Survey

if TYPE_CHECKING:
    from stagelink.control.rendezvous import Rendezvous
    from stagelink.exchange.arrival import Key
    from stagelink.plan import Plan
    from stagelink.schedule import Verdict
    from stagelink.transport.contract import Link, Transport
    from stagelink.transport.events import EventName
    from stagelink.transport.plugins import Plugins

__all__ = ["Engine"]

logger = logging.getLogger("stagelink")
_MAX_FACTS_BYTES = 64 * 1024 * 1024
_ABORT_KEY_S = 1.0


class Engine:
    """Everything that `Handler` drives.

    Args:
        plan: the plan.
        rank: this rank.
        plugins: the transports and observers of this handler.
        rendezvous: the job's store.
        hosts_store: whether this process must outlast the others for it.

    Attributes:
        plane: the control plane.
        mail: the messages.
        openings: how sessions are agreed on.
        reducer: small values over all ranks.
        wiring: the links.
        rendezvous: as given.
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
        self.plan = plan
        self.rank = rank
        self.rendezvous = rendezvous
        self.on_close: list[Callable[[], None]] = []
        self._plugins = plugins
        self._hosts_store = hosts_store
        self._transports: Mapping[str, Transport] = {}
        self._neighbours = neighbours(plan)
        self.plane = Plane(rank)
        self.plane.poller.spin_s = plan.control.spin_us * 1e-6
        pool = BufferPool(plan.limits.pool_bytes)
        observe = self._observe if plugins.hooks.wants_events else None
        endings = Endings(self.plane, followers_of(plan, rank), siblings_of(plan, rank))
        self.mail = Mail(self.plane, plan.control.inline_bytes, observe, endings)
        self.openings = Openings(self.plane)
        self.reducer = Reducer(self.plane, spanning_tree(self._neighbours, rank))
        self.wiring = Wiring(plan, rank, self.plane, self.mail, pool, rendezvous)
        self._watch = AbortWatch(self.plane, rendezvous)

    def join(self, found: Survey, verdict: Verdict, deadline: Deadline) -> None:
        """Meet every peer, agree on transports, open the links; see `stagelink.connect`."""
        self._transports = found.transports
        me = End(self.rank, self._server(), process_id(), found.offers)
        greeting = {
            "facts": _pack_facts(self.plan),
            "digest": self.plan.digest,
            "end": me.to_json(),
        }
        meeting = Meeting(
            self.plane,
            self.rendezvous,
            greeting,
            self._judge,
            me.server,
            self.plan.control.interface,
        )
        self.plane.start()
        meeting.meet(self._neighbours[self.rank], deadline)
        ends = {peer: End.from_json(said["end"]) for peer, said in meeting.greetings.items()}
        ends[self.rank] = me
        self.wiring.agree(ends, found, asker(found, self._plugins.hooks, self.rank), deadline)
        windows = [*map(max, verdict.windows, verdict.forward_windows)]
        self.wiring.enter(windows)
        self.wiring.open(found.transports, deadline)
        for link in self.wiring.links:
            self._plugins.hooks.link_opened(link)
            logger.debug("rank %d: opened %s", self.rank, link)

    def _server(self) -> str:
        index = self.plan.server_of(self.rank)
        return server_id() if index is None else f"server {index}"

    def _judge(self, peer: int, greeting: dict[str, Any]) -> None:
        if greeting.get("digest") == self.plan.digest:
            return
        theirs = _unpack_facts(str(greeting.get("facts")))
        found = differences(self.plan.facts(), theirs, f"rank {peer}")
        raise DisagreementError(
            f"rank {self.rank} and rank {peer} hold different plans: {'; '.join(found)}"
        )

    def fail(self, error: BaseException) -> None:
        """Fail this rank and every other with the error's text; returns at once."""
        failure = (
            error
            if isinstance(error, StagelinkError)
            else AbortedError(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        )
        if failure is not error:
            failure.__cause__ = error
        self.plane.fail(failure)

    def close(self, deadline: Deadline) -> dict[Link, int]:
        """Deliver what was sent, say goodbye and give everything back, by the deadline.

        Returns:
            How many messages could not be delivered, of the links that have some.
        """
        self.plane.start_closing()
        for action in self.on_close:
            action()
        self.mail.abandon()
        lost = self._drain(deadline)
        with ExitStack() as steps:  # from the last to the first, also where one raises
            steps.callback(self._tell_closed)
            steps.callback(self._leave_store, deadline)
            for name, transport in self._transports.items():
                steps.callback(give_back, f"transport {name!r}", transport.close, deadline)
            steps.callback(self.plane.close, deadline)
            steps.callback(self.wiring.close, deadline)
        return lost

    def abandon(self, error: BaseException) -> None:
        """`fail` with an error that is about to be raised, and `close`; nothing else comes out."""
        self.fail(error)
        try:
            self.close(Deadline(self.plan.limits.close_deadline_s))
        except StagelinkError as another:
            logger.warning("rank %d: while it closed after a failure: %s", self.rank, another)

    def _leave_store(self, deadline: Deadline) -> None:
        self._watch.finish(min(_ABORT_KEY_S, deadline.remaining_s))
        self.rendezvous.leave()
        if self._hosts_store:
            # The dead never leave, and after a failure the others need nothing but the abort key.
            failed = self.plane.failure is not None
            self.rendezvous.wait_left(Deadline(_ABORT_KEY_S) if failed else deadline)

    def _tell_closed(self) -> None:
        for link, counters in self.wiring.counters.items():
            self._plugins.hooks.link_closed(link, counters)

    def _drain(self, deadline: Deadline) -> dict[Link, int]:
        try:
            return self.wiring.drain(deadline)
        except StagelinkError:  # it failed meanwhile, which `close` reports if nobody has
            return {}

    def _observe(
        self, name: EventName, link: Link, key: Key, payload_bytes: int, seconds: float
    ) -> None:
        edge = self.plan.edges[key.edge]
        event = Event(
            name,
            link,
            edge.name,
            key.direction,
            key.microbatch,
            key.session,
            payload_bytes,
            seconds,
        )
        self._plugins.hooks.event(event)


def _pack_facts(plan: Plan) -> str:
    return b64encode(zlib.compress(json.dumps(plan.facts()).encode())).decode()


def _unpack_facts(packed: str) -> dict[str, str]:
    raw = zlib.decompressobj().decompress(b64decode(packed), _MAX_FACTS_BYTES)
    facts: dict[str, str] = json.loads(raw)
    return facts
