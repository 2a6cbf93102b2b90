"""How many messages of an edge may be under way to one peer, and whose turn it is next.

What was admitted has room at the receiver, so nothing that arrives can block a connection. A place
is freed when the message's gradient is handed to ``recv_grad``, or, for a message without
gradient, by the CREDIT that the receiver sends when it hands the tensor over. Counts run across
sessions: an answer that comes late only lowers them, and what was parked in a session that was
left still goes.
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
        self._starting: set[tuple[int, int]] = set()

    @property
    def open(self) -> bool:
        """Whether a message may be admitted now; parked ones go first."""
        return not self._parked and len(self._outstanding) < self.size

    def admit(self, session: int, microbatch: int) -> None:
        """Take a place, for a message that is about to start."""
        self._outstanding[session, microbatch] = None
        self._starting.add((session, microbatch))

    def started(self, session: int, microbatch: int) -> None:
        """A message that was admitted is the link's by now, or the connection's."""
        self._starting.discard((session, microbatch))

    def park(self, session: int, microbatch: int, start: Callable[[], None]) -> None:
        """Keep a message that found the window full; ``start`` begins it."""
        self._parked.append(_Parked(session, microbatch, start))

    def release(self, session: int, microbatch: int) -> list[Callable[[], None]]:
        """Free a place; what to call now for the parked messages that got one."""
        self._outstanding.pop((session, microbatch), None)
        return self._unpark(self.size)

    def release_all(self) -> list[Callable[[], None]]:
        """What to call for all that is parked, place or not: the receiver keeps nothing more."""
        return self._unpark(len(self._outstanding) + len(self._parked))

    def _unpark(self, size: int) -> list[Callable[[], None]]:
        starts = []
        while self._parked and len(self._outstanding) < size:
            parked = self._parked.popleft()
            self.admit(parked.session, parked.microbatch)
            starts.append(parked.start)
        return starts

    def holds(self, session: int, microbatch: int) -> bool:
        """Whether a message has a place: it was sent, and is not answered."""
        return (session, microbatch) in self._outstanding

    @property
    def waiting(self) -> int:
        """How many messages have not started."""
        return len(self._parked) + len(self._starting)

    def due(self, session: int) -> list[int]:
        """Microbatches of a session that have not started."""
        waiting = [*self._starting, *((one.session, one.microbatch) for one in self._parked)]
        return [microbatch for of, microbatch in waiting if of == session]

    def outstanding(self, session: int | None = None) -> list[int]:
        """Microbatches that have not been answered, of one session or of all."""
        return [m for s, m in self._outstanding if session is None or s == session]
