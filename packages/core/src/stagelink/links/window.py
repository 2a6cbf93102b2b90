"""Credit-based flow control of one edge and peer (back-pressure), at the sender and the receiver.

What was admitted has room at the receiver, so nothing that arrives can block a connection. Credit
comes back when the message's gradient is handed to ``recv_grad``, or, for a message without
gradient, by the CREDIT that the receiver sends when it hands the tensor over. Counts run across
sessions: an answer that comes late only lowers them, and what was parked in a session that was
left still goes. A peer that does not keep to it has made a `ProtocolError`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from stagelink.errors import ProtocolError


class _Parked(NamedTuple):
    session: int
    microbatch: int
    start: Callable[[], None]


class Window:
    """Credit of one edge towards one peer; used under the plane's lock."""

    def __init__(self) -> None:
        self.size = 1  # how many messages may be outstanding; set anew by each session
        self._outstanding: dict[tuple[int, int], None] = {}
        self._parked: deque[_Parked] = deque()
        self._starting: set[tuple[int, int]] = set()

    def try_admit(self, session: int, microbatch: int) -> bool:
        """Take credit for a message that starts under this lock; parked messages go first."""
        if self._parked or len(self._outstanding) >= self.size:
            return False
        self._outstanding[session, microbatch] = None
        return True

    def admit(self, session: int, microbatch: int) -> None:
        """Take credit, for a message that is about to start, until it has `started`."""
        self._outstanding[session, microbatch] = None
        self.starting(session, microbatch)

    def starting(self, session: int, microbatch: int) -> None:
        """A message that was admitted is about to start, until it has `started`."""
        self._starting.add((session, microbatch))

    def started(self, session: int, microbatch: int) -> None:
        """A message that was admitted is the link's by now, or the connection's."""
        self._starting.discard((session, microbatch))

    def park(self, session: int, microbatch: int, start: Callable[[], None]) -> None:
        """Keep a message that found the window full; ``start`` begins it."""
        self._parked.append(_Parked(session, microbatch, start))

    def release(self, session: int, microbatch: int) -> list[Callable[[], None]]:
        """Give credit back; what to call now for the parked messages that got it."""
        self._outstanding.pop((session, microbatch), None)
        return self._unpark(self.size)

    def release_all(self) -> list[Callable[[], None]]:
        """Release all that is parked, to be called: the receiver keeps nothing more."""
        return self._unpark(len(self._outstanding) + len(self._parked))

    def _unpark(self, size: int) -> list[Callable[[], None]]:
        starts = []
        while self._parked and len(self._outstanding) < size:
            parked = self._parked.popleft()
            self.admit(parked.session, parked.microbatch)
            starts.append(parked.start)
        return starts

    def holds(self, session: int, microbatch: int) -> bool:
        """Whether a message was sent and is not answered."""
        return (session, microbatch) in self._outstanding

    @property
    def waiting(self) -> int:
        """Number of messages that have not started."""
        return len(self._parked) + len(self._starting)

    def due(self, session: int) -> list[int]:
        """Microbatches of a session that have not started."""
        waiting = [*self._starting, *((one.session, one.microbatch) for one in self._parked)]
        return [microbatch for of, microbatch in waiting if of == session]

    def outstanding(self, session: int | None = None) -> list[int]:
        """Microbatches that have not been answered, of one session or of all."""
        return [m for s, m in self._outstanding if session is None or s == session]


class PeerWindow:
    """Credit that a peer has on one edge, as seen from here: no peer is trusted to keep to it.

    A message holds credit from its header's arrival until this rank answers it, which is a shorter
    time than at its sender. So a sender that keeps to its window never has more here. All but
    `free` is used under the plane's lock.
    """

    def __init__(self, edge: str, peer: int) -> None:
        self._edge = edge
        self._peer = peer
        self._size: int | None = None
        self._session = -1
        self._unanswered: set[tuple[int, int]] = set()
        # called with session and microbatch of a message that is about to be answered, or whose
        # gradient is; from any thread
        self.free: Callable[[tuple[int, int]], None] = self._unanswered.discard

    def enter(self, session: int, size: int) -> None:
        """A session begins, with a window of this size. The greatest one so far holds."""
        self._session = session
        if self._size is None or size > self._size:
            self._size = size
        if len(self._unanswered) > self._size:
            self._check(self._size)

    def lift(self) -> None:
        """Lift the limit: nobody here keeps a message, so the peer may send all it has."""
        self._size = None

    def take(self, session: int, microbatch: int) -> None:
        """A message came."""
        message = (session, microbatch)
        if message in self._unanswered:
            raise ProtocolError(
                f"rank {self._peer} sent microbatch {microbatch} (session {session}) of edge "
                f"{self._edge!r} twice"
            )
        self._unanswered.add(message)
        if self._size is not None and len(self._unanswered) > self._size:
            self._check(self._size)

    def _check(self, size: int) -> None:
        # Of a session that has not begun here the window is not known: it is looked at then.
        known = sum(session <= self._session for session, _ in tuple(self._unanswered))
        if known > size:
            raise ProtocolError(
                f"rank {self._peer} sent {known} messages of edge {self._edge!r} without an "
                f"answer; its window is {size}"
            )
