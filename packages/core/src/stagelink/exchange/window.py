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

__all__ = ["Window"]


class Window:
    """Places of one edge towards one peer; used under the plane's lock.

    Attributes:
        size: how many messages may be outstanding; set anew by each session.
    """

    def __init__(self) -> None:
        self.size = 1
        self._outstanding: dict[tuple[int, int], None] = {}
        self._parked: deque[Callable[[], None]] = deque()

    @property
    def open(self) -> bool:
        """Whether a message may be admitted now; parked ones go first."""
        return not self._parked and len(self._outstanding) < self.size

    def admit(self, session: int, microbatch: int) -> None:
        """Take a place."""
        self._outstanding[session, microbatch] = None

    def park(self, start: Callable[[], None]) -> None:
        """Keep a message that found the window full; ``start`` admits and begins it."""
        self._parked.append(start)

    def release(self, session: int, microbatch: int) -> list[Callable[[], None]]:
        """Free a place, and return the parked messages that may start now."""
        self._outstanding.pop((session, microbatch), None)
        room = self.size - len(self._outstanding)
        return [self._parked.popleft() for _ in range(min(max(room, 0), len(self._parked)))]

    def forget_parked(self) -> None:
        """Drop what never started: its session was left."""
        self._parked.clear()

    def outstanding(self, session: int | None = None) -> list[int]:
        """Microbatches that have not been answered, of one session or of all."""
        return [m for s, m in self._outstanding if session is None or s == session]
