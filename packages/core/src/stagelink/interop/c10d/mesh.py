"""The ranks of a group, each connected to every other; links are opened when they are needed."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING

from stagelink.control.rendezvous import Rendezvous
from stagelink.exchange.joint import Joint
from stagelink.exchange.topology import routes_of
from stagelink.exchange.ways import Ways
from stagelink.interop.c10d.mailbox import Mailbox
from stagelink.transport.choice import asked_for
from stagelink.transport.contract import Deadline
from stagelink.transport.header import Direction, Header, MessageKind
from stagelink.transport.offers import survey
from stagelink.transport.plugins import Plugins

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.control.connection import Frame
    from stagelink.exchange.in_link import InLink
    from stagelink.exchange.out_link import OutLink
    from stagelink.plan import Plan
    from stagelink.transport.contract import Link

__all__ = ["Mesh"]

_WINDOW = 16
"""Messages under way for which a link with memory of its own provides; there may be more."""

_EXIT_S = 1.0
_open: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Mesh(Joint):
    """One rank's end of it; blocks until all others have come.

    Args:
        plan: see `stagelink.interop.c10d.options.C10dOptions.plan`.
        rank: this rank, by its place in the group.
        store: of the group.
        run: tells meshes apart that share a store.

    Raises:
        StagelinkError: as `stagelink.connect`.
    """

    def __init__(self, plan: Plan, rank: int, store: Store, run: str) -> None:
        rendezvous = Rendezvous(store, run, rank, plan.world_size)
        super().__init__(plan, rank, Plugins(), rendezvous, hosts_store=False)
        self.box = Mailbox(self.plane, self.link_from)
        self._ways = Ways({}, {}, self.box.on_settled)
        self._asked: set[int] = set()
        self.wire(self._ways)
        self._out: dict[int, OutLink] = {}
        self._in: dict[int, InLink] = {}
        try:
            self._join()
        except BaseException as error:
            self.abandon(error)
            raise
        _open.add(self)

    def _join(self) -> None:
        plan = self.plan
        asked = asked_for(plan, routes_of(plan, self.rank))
        self.meet(
            survey(self._plugins, asked, plan.transports), Deadline(plan.limits.connect_deadline_s)
        )
        # After what `Wiring` does with it: here a peer is ready when it has begun to open.
        self.plane.handle(MessageKind.READY, self._on_ready)
        self.wiring.enter([_WINDOW] * len(plan.edges))
        self._out = {peer: way.link for (_, _, peer), way in self._ways.out.items()}
        self._in = {peer: way.link for (_, _, peer), way in self._ways.into.items()}

    def direction_to(self, peer: int) -> Direction:
        """Which way along their edge a message to a peer goes."""
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
        if peer in self._asked:
            return
        with self.plane.lock:
            if peer in self._asked:
                return
            self._asked.add(peer)
        self.plane.post(peer, Header(MessageKind.READY))
        deadline = Deadline(self.plan.limits.connect_deadline_s)
        self.wiring.open_pair(peer, self._transports, deadline)

    def _on_ready(self, peer: int, frame: Frame) -> None:
        del frame
        self._need(peer)

    def close(self, deadline: Deadline) -> dict[Link, int]:
        """As `Joint.close`."""
        _open.discard(self)
        return super().close(deadline)

    def _tell_closed(self) -> None:
        """Nobody was told that a link was opened."""


def _leave_all() -> None:
    """A program may end without `destroy_process_group`: that is no death."""
    for mesh in tuple(_open):
        mesh.close(Deadline(_EXIT_S))


atexit.register(_leave_all)
