"""The choice of a transport for every route, made alike on both of its ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stagelink.control.connection import Frame
from stagelink.control.framing import decode, encode
from stagelink.control.meeting import wait_for_ranks
from stagelink.control.plane import Plane
from stagelink.control.rendezvous import Rendezvous
from stagelink.deadline import Deadline
from stagelink.errors import DisagreementError
from stagelink.links.topology import routes_of
from stagelink.plan import Plan
from stagelink.plugins.choice import Asker, Choice, choose
from stagelink.plugins.offers import End
from stagelink.transport.header import Header, MessageKind

Choices = Mapping[tuple[int, int, int], "Choice"]
"""The transport of each (edge index, source rank, target rank) that touches a rank."""


class Agreement:
    """Choice of transports that this rank and its peers, once all are met, make alike."""

    def __init__(self, plan: Plan, plane: Plane, rendezvous: Rendezvous) -> None:
        self.plane = plane
        self._plan = plan
        self._rendezvous = rendezvous
        self._theirs: dict[int, dict[str, str]] = {}
        plane.handle(MessageKind.CHOSEN, self._on_chosen)

    def reach(
        self,
        ends: Mapping[int, End],
        ask: Asker,
        build: Callable[[Choices], None],
        deadline: Deadline,
    ) -> None:
        """Choose a transport for every route, and make sure that each peer has chosen the same.

        ``build`` makes the ends of the links that are chosen here. A peer goes on when it has this
        rank's choice, and what it sends must then find its route. `NoTransportError` where nothing
        can carry a route, `DisagreementError` where a peer chose another.
        """
        choices = {
            (edge.index, source, target): choose(self._plan, edge, ends[source], ends[target], ask)
            for edge, source, target in routes_of(self._plan, self.plane.rank)
        }
        build(choices)
        mine = {peer: self._chosen_with(peer, choices) for peer in self.plane.peers}
        for peer, chosen in mine.items():
            self.plane.post(peer, Header(MessageKind.CHOSEN), encode(chosen))
        step, absent = "choice of transports", lambda: mine.keys() - self._theirs.keys()
        wait_for_ranks(self.plane, self._rendezvous, step, absent, deadline)
        for peer, chosen in mine.items():
            self._compare(peer, chosen, self._theirs[peer])

    def _chosen_with(self, peer: int, choices: Choices) -> dict[str, str]:
        return {
            f"{self._plan.edges[edge].name} {source}→{target}": choice.transport
            for (edge, source, target), choice in choices.items()
            if peer in (source, target)
        }

    def _on_chosen(self, peer: int, frame: Frame) -> None:
        with self.plane.lock:
            self._theirs[peer] = decode(frame.note)

    def _compare(self, peer: int, mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
        for route in sorted(mine.keys() | theirs.keys()):
            if mine.get(route) != theirs.get(route):
                raise DisagreementError(
                    f"transport of {route}: {mine.get(route)!r} on rank {self.plane.rank}, "
                    f"{theirs.get(route)!r} on rank {peer}; are both given the same plugins?"
                )
