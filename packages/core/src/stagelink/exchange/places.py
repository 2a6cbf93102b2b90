"""The windows of those who send to this rank, as seen from here: no peer is trusted to keep one.

A message holds its place from its header's arrival until this rank answers it, which is a shorter
time than at its sender. So a sender that keeps to its window never has more here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from stagelink.errors import ProtocolError
from stagelink.transport.header import Direction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stagelink.links.arrival import Key
    from stagelink.links.ways import WayIn
    from stagelink.plan import Edge
    from stagelink.transport.header import Header

__all__ = ["Places"]


class Places:
    """Forward messages that came and were not answered, by edge and sender.

    `take`, `enter` and `lift` are used under the plane's lock.
    """

    def __init__(self) -> None:
        self._unanswered: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        self._session = -1
        self._sizes: dict[int, int] = {}

    def enter(self, session: int, ways: Iterable[WayIn], window_of: Callable[[Edge], int]) -> None:
        """A session begins, with windows of these sizes. The greatest ones so far hold.

        Raises:
            ProtocolError: a peer has sent more of it, or of those before, than that.
        """
        self._session = session
        for way in ways:
            if way.direction is Direction.FORWARD:
                edge = way.edge
                self._sizes[edge.index] = max(window_of(edge), self._sizes.get(edge.index, 0))
                self._check(way)

    def lift(self) -> None:
        """Nobody here keeps a message any more: who has some left may send it all."""
        self._sizes.clear()

    def take(self, way: WayIn, header: Header) -> None:
        """A message came.

        Raises:
            ProtocolError: it came twice, or is one more than the window of its sender.
        """
        held = self._unanswered[way.edge.index, way.peer]
        message = (header.session, header.microbatch)
        if message in held:
            raise ProtocolError(
                f"rank {way.peer} sent microbatch {header.microbatch} (session {header.session}) "
                f"of edge {way.edge.name!r} twice"
            )
        held.add(message)
        self._check(way)

    def _check(self, way: WayIn) -> None:
        # Of a session that has not begun here the window is not known: it is looked at then.
        size = self._sizes.get(way.edge.index)
        held = self._unanswered[way.edge.index, way.peer]
        if size is None or len(held) <= size:
            return
        known = sum(session <= self._session for session, _ in tuple(held))
        if known > size:
            raise ProtocolError(
                f"rank {way.peer} sent {known} messages of edge {way.edge.name!r} without an "
                f"answer; its window is {size}"
            )

    def free(self, peer: int, key: Key) -> None:
        """A message is about to be answered, or its gradient sent; from any thread."""
        self._unanswered[key.edge, peer].discard((key.session, key.microbatch))
