"""How many messages of an edge may be under way to one peer, and whose turn it is next.

What was admitted has room at the receiver, so nothing that arrives can block a connection. A place
is freed when the message's gradient is handed to ``recv_grad``, or, for a message without
gradient, by the CREDIT that the receiver sends when it hands the tensor over. Counts run across
    sessions: an
answer that comes late only lowers them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Window"]


class _Parked(NamedTuple):
    session: int
    microbatch: int
    start: Callable[[], None]


class Window:
    """Places of one edge towards one peer; used under the plane's lock.

    Attributes:
        size: how many messages may be outstanding; set anew by each session.
    """

    def __init__(self) -> None:
        self.size = 1
        self._outstanding: dict[tuple[int, int], None] = {}
        self._parked: deque[_Parked] = deque()

    @property
    def open(self) -> bool:
        """Whether a message may be admitted now; parked ones go first."""
        return not self._parked and len(self._outstanding) < self.size

    def admit(self, session: int, microbatch: int) -> None:
        """Take a place."""
        self._outstanding[session, microbatch] = None

    def park(self, session: int, microbatch: int, start: Callable[[], None]) -> None:
        """Keep a message that found the window full; ``start`` begins it."""
        self._parked.append(_Parked(session, microbatch, start))

    def release(self, session: int, microbatch: int) -> list[Callable[[], None]]:
        """Free a place; what to call now for the parked messages that got one."""
        self._outstanding.pop((session, microbatch), None)
        starts = []
        while self._parked and len(self._outstanding) < self.size:
            parked = self._parked.popleft()
            self.admit(parked.session, parked.microbatch)
            starts.append(parked.start)
        return starts

    def holds(self, session: int, microbatch: int) -> bool:
        """Whether a message has a place: it was sent, and is not answered."""
        return (session, microbatch) in self._outstanding

    def forget_parked(self) -> None:
        """Drop what never started: its session was left."""
        self._parked.clear()

    def outstanding(self, session: int | None = None) -> list[int]:
        """Microbatches that have not been answered, of one session or of all."""
        return [m for s, m in self._outstanding if session is None or s == session]
