"""One direction of one edge between this rank and one peer, at either end."""

from __future__ import annotations

from collections.abc import Callable

from stagelink.links.in_link import InLink
from stagelink.links.out_link import OutLink
from stagelink.links.window import PeerWindow, Window
from stagelink.plan import Edge
from stagelink.transport.contract import Link
from stagelink.transport.events import EventName, LinkCounters
from stagelink.transport.header import Direction, Header

Observe = Callable[["EventName", "Link", "Header", float, float], None]
"""Tell observers: event, link, the message's header, seconds, and when it ended."""

Trace = Callable[["Link", "Header"], bytes]
"""Ask observers for the trace context of a message that a link is to carry."""

RouteKey = tuple[int, Direction, int]
"""Edge index, direction and peer, by which a rank finds its end of a route."""


class OutRoute:
    """One direction of an edge towards one peer, at the sending rank."""

    __slots__ = (
        "answers", "back", "counters", "direction", "dtypes", "edge", "has_contract", "link",
        "on_host", "peer", "window",
    )  # fmt: skip

    def __init__(
        self,
        edge: Edge,
        peer: int,
        link: OutLink,
        counters: LinkCounters,
        answers: InRoute | None = None,
    ) -> None:
        self.edge = edge
        self.direction = Direction.FORWARD if answers is None else Direction.BACKWARD
        self.peer = peer
        self.link = link
        self.counters = counters
        self.window = Window()  # credit for messages; a way back needs none
        self.has_contract = edge.tensor.has_contract
        self.dtypes = link.dtypes
        self.on_host = link.stream.device.type == "cpu"  # whether it carries host memory
        self.back: InRoute | None = None  # answers this one; None where no gradient comes back
        self.answers = answers  # of a way back, the route whose messages it answers
        if answers is not None:
            answers.back = self


class InRoute:
    """One direction of an edge from one peer, at the receiving rank."""

    __slots__ = (
        "answers", "back", "counters", "direction", "edge", "has_contract", "link", "peer",
        "window",
    )  # fmt: skip

    def __init__(
        self,
        edge: Edge,
        peer: int,
        link: InLink,
        counters: LinkCounters,
        answers: OutRoute | None = None,
    ) -> None:
        self.edge = edge
        self.direction = Direction.FORWARD if answers is None else Direction.BACKWARD
        self.peer = peer
        self.link = link
        self.counters = counters
        self.window = PeerWindow(edge.name, peer)  # credit that it has; a way back needs none
        self.has_contract = edge.tensor.has_contract
        self.back: OutRoute | None = None  # answers this one; None where no gradient is sent back
        self.answers = answers  # of a way back, the route whose messages it answers
        if answers is not None:
            answers.back = self
