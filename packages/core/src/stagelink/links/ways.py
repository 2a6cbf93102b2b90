"""One direction of one edge between this rank and one peer, at either end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stagelink.links.in_link import InLink
    from stagelink.links.out_link import OutLink
    from stagelink.links.window import Window
    from stagelink.plan import Edge
    from stagelink.transport.contract import Link
    from stagelink.transport.events import EventName, LinkCounters
    from stagelink.transport.header import Direction, Header

__all__ = ["Observe", "Trace", "WayIn", "WayOut", "Ways"]

Observe = Callable[["EventName", "Link", "Header", float, float], None]
"""Tell observers: event, link, the message's header, seconds, and when it ended."""

Trace = Callable[["Link", "Header"], bytes]
"""Ask observers for the trace context of a message that a link is to carry."""


@dataclass(frozen=True, slots=True, eq=False)
class WayOut:
    """One direction of an edge towards one peer, at the sending rank."""

    edge: Edge
    direction: Direction
    peer: int
    link: OutLink
    window: Window | None
    counters: LinkCounters


@dataclass(frozen=True, slots=True, eq=False)
class WayIn:
    """One direction of an edge from one peer, at the receiving rank."""

    edge: Edge
    direction: Direction
    peer: int
    link: InLink
    counters: LinkCounters


class Ways(NamedTuple):
    """Where the links of a rank put themselves.

    Attributes:
        out: ways that begin here, by (edge index, direction, peer).
        into: ways that end here, likewise.
    """

    out: dict[tuple[int, Direction, int], WayOut]
    into: dict[tuple[int, Direction, int], WayIn]
