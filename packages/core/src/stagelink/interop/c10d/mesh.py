"""The ranks of a group, each connected to every other, with links that are opened when needed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import Store

from stagelink.control.opening import open_store
from stagelink.control.rendezvous import Rendezvous
from stagelink.deadline import Deadline
from stagelink.exchange.unclosed import closed, opened
from stagelink.interop.c10d.errors import error_like
from stagelink.interop.c10d.mailbox import MAX_TEXT, Mailbox, MatchingKey, Unwanted
from stagelink.interop.c10d.outbox import Outbox
from stagelink.links.arrival import Arrival
from stagelink.links.in_link import InLink
from stagelink.links.node import Node
from stagelink.links.out_link import OutLink, SendJob
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


class Mesh:
    """One rank's end of it; blocks until all others have come. Raises as `stagelink.connect`.

    Args:
        plan: see `stagelink.interop.c10d.options.C10dOptions.plan`.
        ranks: what the group's ranks are called, by their places in it.
        store: one that only meshes of these ranks share; one after the other may.
        patience_s: for the others to come.
        eager_bytes: what each peer may send to this rank before it is asked for, see `Mailbox`.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Sequence[int],
        rank: int,
        store: Store,
        patience_s: float,
        eager_bytes: int,
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
        self.box = Mailbox(self.plane, self.link_from, eager_bytes)
        self.outbox = Outbox(self.plane, self.link_to)
        # those of the group's meshes for tensors on other devices
        self.other_boxes: list[Mailbox] = []
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
        self.box.open()
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

    def send(self, key: MatchingKey, header: Header, raw: bytes | torch.Tensor) -> SendJob | None:
        """Send a message now, or when its receiver has room or asks for it; returns at once.

        Its payload is the sender's memory, until the job is finished, which it returns unless it
        is already. Raises where the transport fails.
        """
        if key.peer == self.rank:
            arrival = Arrival(header, self.rank)
            arrival.payload = raw
            return self.box.put(key, arrival)
        job = SendJob(header, raw)
        self.outbox.post(key, job)
        return None if job.finished else job

    def refuse(self, key: MatchingKey, text: str) -> None:
        """Have the receive of this message raise, with the first `MAX_TEXT` characters."""
        text = text[:MAX_TEXT]
        header = key.header(self.direction_to(key.peer), Header(MessageKind.REFUSED))
        if key.peer == self.rank:
            arrival = Arrival(header, self.rank)
            arrival.refusal = text
            self.box.put(key, arrival)
            return
        self.plane.check()
        self.plane.goodbyes.check_here(key.peer, "a receive there")
        self.outbox.charge(key.peer, header)
        self.plane.post(key.peer, header, text.encode())

    def drop_elsewhere(self, key: MatchingKey) -> None:
        """Drop what comes to the same key for tensors on other devices, be it here already.

        A refusal comes on every mesh, as its sender does not know which one it is received on.
        """
        for box in self.other_boxes:
            box.ask(key, Unwanted())

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
        for peer, count in self.outbox.held().items():
            logger.warning(
                "rank %d: closed with %d messages that rank %d has not asked for",
                self.rank, count, peer,
            )  # fmt: skip
        return lost

    def leave(self, error: BaseException | None) -> None:
        """Deliver what was sent, as long as `close` may take in all, and close at once.

        A program may end without `destroy_process_group`: that is no death, nor is an error.
        """
        del error
        if not self.plane.failure.forked:
            self.node.drain(Deadline(self.plan.limits.close_deadline_s))
            self.close(Deadline(_EXIT_S))
