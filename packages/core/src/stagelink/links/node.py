"""One rank among the others: its control plane, its links and the store, joined and given back.

What is sent over the links, and when, is for those who build on this.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from stagelink.control.framing import encode
from stagelink.control.meeting import Meeting
from stagelink.control.plane import Plane
from stagelink.control.rendezvous import Rendezvous
from stagelink.deadline import Deadline
from stagelink.errors import AbortedError, DisagreementError, StagelinkError
from stagelink.links.agreement import Agreement
from stagelink.links.calls import give_back
from stagelink.links.topology import neighbours
from stagelink.links.wiring import Wiring
from stagelink.plan import Plan, differences
from stagelink.plugins.choice import asker
from stagelink.plugins.offers import End, Survey
from stagelink.plugins.plugins import Plugins
from stagelink.transport.buffers import BufferPool
from stagelink.transport.contract import Link, Transport
from stagelink.transport.host import process_id, server_id
from stagelink.transport.interrupts import stops_caller

logger = logging.getLogger("stagelink")
_MAX_FACTS_BYTES = 64 * 1024 * 1024
_ABORT_KEY_S = 1.0
_EVERY_S = 1.0


class Node:
    """The parts of a rank that do not know what a message is.

    Args:
        hosts_store: whether this process must outlast the others for it.
        on_ready: see `Wiring`.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        plugins: Plugins,
        rendezvous: Rendezvous,
        *,
        hosts_store: bool,
        on_ready: Callable[[int], None] | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.rendezvous = rendezvous
        self.hooks = plugins.hooks
        self._hosts_store = hosts_store
        self.transports: Mapping[str, Transport] = {}  # by name, once it has met its peers
        # called, in order, when closing begins: nobody sends or asks for anything any more; each
        # returns at once
        self.on_close: list[Callable[[], None]] = []
        self._told: list[Link] = []
        self._neighbours = neighbours(plan)
        self.plane = Plane(rank)
        self.plane.reader.spin_s = plan.control.spin_us * 1e-6
        self._watch = _AbortWatch(self.plane, rendezvous)
        self._agreement = Agreement(plan, self.plane, rendezvous)
        pool = BufferPool(plan.limits.pool_bytes)
        self.wiring = Wiring(plan, rank, self.plane, pool, rendezvous, on_ready)

    def meet(self, found: Survey, deadline: Deadline) -> None:
        """Connect with every peer, and agree on transports; see `stagelink.connect`."""
        self.rendezvous.enter(deadline)
        self.transports = found.transports
        for name, offer in found.offers.items():
            # Another transport may be taken in its place, and then nothing else would say so.
            if offer.state == "unusable" and self.plan.transports.get(name):
                logger.warning("rank %d: no %r here: %s", self.rank, name, offer.reason)
        me = End(self.rank, self._server(), process_id(), found.offers)
        facts, digest = _pack_facts(self.plan), self.plan.digest
        greeting = {"facts": facts, "digest": digest, "end": me.to_json()}
        meeting = Meeting(
            self.plane, self.rendezvous, greeting, self._judge, me.server, self.plan.control
        )
        self.plane.reader.start()
        meeting.meet(self._neighbours[self.rank], deadline)
        ends = {peer: End.from_json(said["end"]) for peer, said in meeting.greetings.items()}
        ends[self.rank] = me
        build = partial(self.wiring.build, found.transports)
        self._agreement.reach(ends, asker(found, self.hooks, self.rank), build, deadline)

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
        self.plane.failure.fail(failure)

    def close(self, deadline: Deadline) -> dict[Link, int]:
        """Deliver what was sent, say goodbye and give everything back, by the deadline.

        Returns how many messages could not be delivered, of the links that have some.
        """
        self.plane.start_closing()
        with ExitStack() as steps:  # from the last to the first, also where one raises
            for link in reversed(self._told):
                steps.callback(self.hooks.link_closed, link, self.wiring.counters[link])
            steps.callback(self._leave_store, deadline)
            for name, transport in self.transports.items():
                steps.callback(give_back, f"transport {name!r}", transport.close, deadline)
            steps.callback(self.plane.close, deadline)
            steps.callback(self.wiring.close, deadline)
            try:
                with ExitStack() as actions:
                    for action in reversed(self.on_close):
                        actions.callback(action)
            finally:
                lost = self.drain(deadline)
            return lost

    def tell_opened(self) -> None:
        """Tell the observers of every link; who was told is told when it is closed."""
        for link in self.wiring.links:
            self._told.append(link)
            self.hooks.link_opened(link)
            logger.debug("rank %d: opened %s", self.rank, link)

    def abandon(self, error: BaseException) -> None:
        """`fail` with an error that is about to be raised, and `close`; nothing else comes out."""
        self.fail(error)
        try:
            self.close(Deadline(self.plan.limits.close_deadline_s))
        except StagelinkError as another:
            if stops_caller(another):
                raise
            logger.warning("rank %d: while it closed after a failure: %s", self.rank, another)

    def _leave_store(self, deadline: Deadline) -> None:
        if self.plane.failure.error is not None:
            # The dead never leave, and after a failure the others need nothing but the abort key.
            deadline = Deadline(min(_ABORT_KEY_S, deadline.remaining_s))
            self._watch.finish(deadline)
        self.rendezvous.leave(deadline, hosts_store=self._hosts_store)

    def drain(self, deadline: Deadline) -> dict[Link, int]:
        """Drain like `Wiring.drain`, but a handler that has failed delivers nothing."""
        try:
            return self.wiring.drain(deadline)
        except StagelinkError as error:
            if stops_caller(error):
                raise
            return {}  # it failed meanwhile, which `close` reports if nobody has


class _AbortWatch:
    """The abort key in the store: writes this rank's failure there, and finds those of others.

    Neither the reading thread nor a caller waits for the store: it may have gone without a word.
    """

    def __init__(self, plane: Plane, rendezvous: Rendezvous) -> None:
        self._plane = plane
        self._rendezvous = rendezvous
        self._looking: threading.Event | None = None
        self._telling: threading.Event | None = None
        self._last_look = 0.0
        plane.failure.on_failure(self._on_failure)
        plane.reader.on_long_wait = self.look

    def look(self) -> None:
        """Have the abort key looked at, at most once a second; returns at once."""
        now = time.monotonic()
        if now - self._last_look < _EVERY_S:
            return
        if self._looking is None or self._looking.is_set():
            self._last_look = now
            self._looking = self._rendezvous.find_failure(self._plane.failure.fail_as_told)

    def _on_failure(self, cause: StagelinkError) -> None:
        del cause
        self._rendezvous.cut()
        self._telling = self._rendezvous.tell_failure(encode(self._plane.failure.cause).decode())

    def finish(self, deadline: Deadline) -> None:
        """Wait until a failure of this rank is in the store, or the deadline."""
        if self._telling is not None:
            self._telling.wait(deadline.remaining_s)


def _pack_facts(plan: Plan) -> str:
    return b64encode(zlib.compress(json.dumps(plan.facts()).encode())).decode()


def _unpack_facts(packed: str) -> dict[str, str]:
    raw = zlib.decompressobj().decompress(b64decode(packed), _MAX_FACTS_BYTES)
    facts: dict[str, str] = json.loads(raw)
    return facts
