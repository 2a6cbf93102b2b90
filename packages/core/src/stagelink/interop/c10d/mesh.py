"""The ranks of a group, each connected to every other, and a mailbox for what they send.

Links are opened when they are needed. Messages are told apart by group, peer, tag and number. A
receive that is posted first has the message put into its own tensor; others wait here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch.distributed import Store

from stagelink.control.connection import Frame
from stagelink.control.opening import open_store
from stagelink.control.plane import Plane
from stagelink.control.rendezvous import Rendezvous
from stagelink.deadline import Deadline
from stagelink.errors import ProtocolError
from stagelink.exchange.unclosed import closed, opened
from stagelink.interop.c10d.errors import error_like
from stagelink.links.arrival import Arrival
from stagelink.links.in_link import InLink
from stagelink.links.node import Node
from stagelink.links.out_link import OutLink
from stagelink.links.topology import routes_of
from stagelink.plan import Plan
from stagelink.plugins.choice import asked_for
from stagelink.plugins.offers import survey
from stagelink.plugins.plugins import Plugins
from stagelink.transport.contract import Link
from stagelink.transport.header import Direction, Header, MessageKind

logger = logging.getLogger("stagelink")
_WINDOW = 16
"""Messages in flight for which a link with memory of its own provides; there may be more."""

_EXIT_S = 1.0
_WORD = 2**32
_MAX_TEXT_BYTES = 64 * 1024


class MatchingKey(NamedTuple):
    """Matching key of a message.

    Attributes:
        group: number of the group, the same on all its ranks; below 2 to the 64th.
        peer: the other rank, by its place in the mesh.
        tag: the caller's.
        number: how many there were before between the two with that tag in that group.
    """

    group: int
    peer: int
    tag: int
    number: int

    def header(self, direction: Direction, like: Header) -> Header:
        """The header of a message with this key; kind, dtype, size and flags as given."""
        return like._replace(
            direction=direction,
            session=self.group // _WORD,
            edge=self.group % _WORD,
            microbatch=self.tag,
            sequence=self.number,
        )

    @classmethod
    def of(cls, peer: int, header: Header) -> MatchingKey:
        """Key of a message that a peer sends."""
        group = header.session * _WORD + header.edge
        return cls(group, peer, header.microbatch, header.sequence)


class Claim(Protocol):
    """A posted receive."""

    def meet(self, arrival: Arrival) -> None:
        """The header is here: say where the payload is best put; with a lock held."""

    def take(self, arrival: Arrival) -> None:
        """The message is whole; called once, on whichever thread finished it; never raises."""

    def give_up(self) -> None:
        """The group was destroyed, and the message will not be looked for."""


class Mailbox:
    """Messages that were received, and receives that are posted.

    The link that a peer's messages come by is opened by asking for it.
    """

    def __init__(self, plane: Plane, link_from: Callable[[int], InLink]) -> None:
        self._plane = plane
        self._link_from = link_from
        self._lock = threading.Lock()
        self._claims: dict[MatchingKey, Claim] = {}
        self._here: dict[MatchingKey, Arrival] = {}
        self._claimed: dict[Arrival, Claim] = {}
        self._forgotten: set[int] = set()
        for kind in (MessageKind.DATA, MessageKind.REFUSED):
            plane.handle(kind, self._on_message)

    def _on_message(self, peer: int, frame: Frame) -> None:
        arrival = Arrival(frame.header, peer, self._on_settled)
        key = MatchingKey.of(peer, frame.header)
        refused = frame.header.kind is MessageKind.REFUSED
        if refused:
            arrival.refusal = frame.note.decode(errors="replace")
        with self._lock:
            claim = self._claims.pop(key, None)
            if claim is None:
                self._keep(key, arrival)
            else:
                claim.meet(arrival)
                self._claimed[arrival] = claim
        if refused or frame.header.inline:
            arrival.payload = frame.payload
            self._on_settled(arrival)
        else:
            self._link_from(peer).announced(arrival, frame.note, frame.take_fds())

    def _keep(self, key: MatchingKey, arrival: Arrival) -> None:
        if key in self._here:
            raise ProtocolError(f"two messages of {key}")
        if key.group not in self._forgotten:
            self._here[key] = arrival

    def forget(self, group: int) -> None:
        """A group was destroyed: drop what came and comes for it, and tell those that asked."""
        with self._lock:
            self._forgotten.add(group)
            for key in [key for key in self._here if key.group == group]:
                del self._here[key]
            asked = [key for key in self._claims if key.group == group]
            claims = [self._claims.pop(key) for key in asked]
        for claim in claims:
            claim.give_up()
        self._plane.changed()

    def _on_settled(self, arrival: Arrival) -> None:
        """A message is whole; on whichever thread finished it."""
        with self._lock:
            arrival.settled = True
            claim = self._claimed.pop(arrival, None)
        if claim is not None:
            claim.take(arrival)
            self._plane.changed()

    def awaits(self, key: MatchingKey) -> bool:
        """Whether somebody has asked for a message whose header is not here."""
        with self._lock:
            return key in self._claims

    def put(self, key: MatchingKey, arrival: Arrival) -> None:
        """A message of this rank to itself."""
        with self._lock:
            claim = self._claims.pop(key, None)
            if claim is None:
                arrival.settled = True
                self._keep(key, arrival)
        if claim is not None:
            claim.take(arrival)
            self._plane.changed()

    def ask(self, key: MatchingKey, claim: Claim) -> None:
        """Have ``claim`` take the message, now or when it is whole."""
        with self._lock:
            arrival = self._here.pop(key, None)
            settled = arrival is not None and arrival.settled
            if arrival is None:
                self._claims[key] = claim
            elif not settled:
                self._claimed[arrival] = claim
        if arrival is not None and settled:
            claim.take(arrival)


class Mesh:
    """One rank's end of it; blocks until all others have come.

    Args:
        plan: see `stagelink.interop.c10d.options.C10dOptions.plan`.
        ranks: what the group's ranks are called, by their places in it.
        rank: this rank's place.
        store: one that only meshes of these ranks share; one after the other may.
        patience_s: for the others to come.

    Raises:
        StagelinkError: as `stagelink.connect`.
    """

    def __init__(
        self, plan: Plan, ranks: Sequence[int], rank: int, store: Store, patience_s: float
    ) -> None:
        client = open_store(store, rank, plan.world_size, Deadline(patience_s))
        rendezvous = Rendezvous(
            client, plan.name, rank, plan.world_size, patience_s=plan.limits.connect_deadline_s
        )
        self._plugins = Plugins()
        self.node = Node(
            plan, rank, self._plugins, rendezvous, hosts_store=False, on_ready=self._need
        )
        self.plan, self.rank, self.plane = plan, rank, self.node.plane
        self.box = Mailbox(self.plane, self.link_from)
        self._ranks = ranks
        self._joined = False
        self._early: set[int] = set()
        self._asked: set[int] = set()
        self._closed = False
        opened(self)
        try:
            self._join(Deadline(patience_s))
        except BaseException as error:
            self.abandon(error)
            raise

    def _join(self, deadline: Deadline) -> None:
        plan = self.plan
        asked = asked_for(plan, routes_of(plan, self.rank))
        devices = {stage.device for stage in plan.stages}
        found = survey(self._plugins, asked, plan.transports, devices)
        self.node.meet(found, deadline)
        self.node.wiring.enter([_WINDOW] * len(plan.edges))
        with self.plane.lock:
            self._joined = True
        for peer in self._early:
            self._need(peer)

    # A peer may be through before this rank, and send: the links are there as soon as it knows
    # of this rank's choice.

    @cached_property
    def _out(self) -> dict[int, OutLink]:
        return {peer: route.link for (_, _, peer), route in self.node.wiring.out.items()}

    @cached_property
    def _in(self) -> dict[int, InLink]:
        return {peer: route.link for (_, _, peer), route in self.node.wiring.into.items()}

    @property
    def transports(self) -> dict[int, str]:
        """Transports of messages to each peer, by its place in the group."""
        return {peer: link.link.transport for peer, link in self._out.items()}

    def direction_to(self, peer: int) -> Direction:
        """Direction of messages to a peer along their edge."""
        return Direction.FORWARD if self.rank < peer else Direction.BACKWARD

    def link_to(self, peer: int) -> OutLink:
        """The link to a peer; it is opened now, if it is not open."""
        self._need(peer)
        return self._out[peer]

    def link_from(self, peer: int) -> InLink:
        """The link from a peer; it is opened now, if it is not open."""
        self._need(peer)
        return self._in[peer]

    def _need(self, peer: int) -> None:
        if peer in self._asked or peer in self.plane.gone:
            return
        with self.plane.lock:
            if not self._joined:
                self._early.add(peer)
                return
            if peer in self._asked:
                return
            self._asked.add(peer)
        self.plane.post(peer, Header(MessageKind.READY))
        deadline = Deadline(self.plan.limits.connect_deadline_s)
        self.node.wiring.open_pair(peer, self.node.transports, deadline)

    def refuse(self, key: MatchingKey, text: str) -> None:
        """Have the receive of this message raise.

        Raises:
            StagelinkError: the group has failed, or the peer has closed.
        """
        header = key.header(self.direction_to(key.peer), Header(MessageKind.REFUSED))
        if key.peer == self.rank:
            arrival = Arrival(header, self.rank)
            arrival.refusal = text
            self.box.put(key, arrival)
            return
        self.plane.check()
        self.plane.goodbyes.check_here(key.peer, "a receive there")
        self.plane.post(key.peer, header, text.encode()[:_MAX_TEXT_BYTES])

    def error(self, what: str, error: BaseException) -> dist.DistBackendError:
        """An error for torch's caller; of a message that cannot be, also one of ours."""
        places = [*range(len(self._ranks))]
        named = "" if [*self._ranks] == places else f" (ranks here are places in {self._ranks})"
        return error_like(error, f"{what}: {error}{named}")

    def abandon(self, error: BaseException) -> None:
        """Fail every rank of the mesh with an error that is about to be raised, and close."""
        if self._closed or self.plane.failure.forked:
            self.node.fail(error)
            return
        self._closed = True
        closed(self)
        self.node.abandon(error)

    def close(self, deadline: Deadline) -> dict[Link, int]:
        """Close the node; the second time, or in a fork, nothing is done."""
        if self.plane.failure.forked or self._closed:
            return {}
        self._closed = True
        closed(self)
        lost = self.node.close(deadline)
        for link, count in lost.items():
            logger.warning("rank %d: closed with %d not delivered on %s", self.rank, count, link)
        return lost

    def leave(self, error: BaseException | None) -> None:
        """Deliver what was sent, as long as `close` may take in all, and close at once.

        A program may end without `destroy_process_group`: that is no death, nor is an error.
        """
        del error
        if not self.plane.failure.forked:
            self.node.drain(Deadline(self.plan.limits.close_deadline_s))
            self.close(Deadline(_EXIT_S))
