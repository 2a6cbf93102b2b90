"""What both ends of a link share inside core: notes, and the thread that finishes messages.

A worker thread finishes in the order of ``begin``; it is started on first use, and not at all
where nothing is left to finish.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from stagelink.control.connection import close_all
from stagelink.errors import ClosedError, PeerClosedError, StagelinkError, TransportError
from stagelink.transport.contract import Deadline
from stagelink.transport.interrupts import stops_caller

if TYPE_CHECKING:
    from stagelink.transport.contract import Receiver, Sender
    from stagelink.transport.lanes import Lane

__all__ = ["FOREVER", "LinkEnd", "give_back", "mapped", "raise_mapped"]

_GRACE_S = 0.2
"""What a step of closing gets when those before it have used up the time."""

FOREVER = Deadline(float("inf"))
"""How long a worker may wait: death, abort and close end it; callers have deadlines of theirs."""


class LinkEnd(ABC):
    """What both ends share: notes, and the worker, started when there is something to finish.

    Attributes:
        unfinished: how many messages are on their way through this end.
        given_up: whether the worker has ended since its peer, or this rank, closed.
        lane: where what is done is queued.
    """

    unfinished = 0

    def __init__(
        self,
        name: str,
        lane: Lane,
        fail: Callable[[StagelinkError], None],
        changed: Callable[[], None],
    ) -> None:
        self.lane = lane
        self._changed = changed
        self._notes_lock = threading.RLock()
        self._held_notes: deque[tuple[bytes, Sequence[int]]] = deque()
        self._end: Sender | Receiver | None = None
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._name = name
        self._fail = fail
        self._stopped = False
        self.given_up = False
        self._thread: threading.Thread | None = None

    def note(self, note: bytes, fds: Sequence[int]) -> None:
        """A note from the twin; held until this end is open. Runs on the reading thread."""
        with self._notes_lock:
            if self._stopped:
                close_all(fds)
            elif self._end is None:
                self._held_notes.append((note, fds))
            else:
                self._end.on_note(note, fds)

    def _opened(self, end: Sender | Receiver) -> None:
        with self._notes_lock:
            if self._stopped:  # it took longer than whoever opened it would wait
                end.close(Deadline(_GRACE_S))
                return
            self._end = end
            while self._held_notes:
                end.on_note(*self._held_notes.popleft())

    def abort(self, cause: StagelinkError) -> None:
        """The handler failed: wake the worker, wherever it is. Returns at once."""
        with self._notes_lock:
            end = self._end
        if end is not None:
            end.abort(cause)

    @property
    def idle(self) -> bool:
        """Whether nothing is being finished: what is unfinished will not be; never blocks."""
        try:  # from before it has the lock: a signal handler may raise as soon as it has
            # Else somebody is at it, perhaps between one message and the next.
            mine = self._lock.acquire(blocking=False)
            return mine and (self.given_up or not self._has_work())
        finally:
            try:  # nor may one raise between here and the release
                self._lock.release()
            except RuntimeError as error:  # it is not this thread's
                if stops_caller(error):
                    raise

    def check_open(self) -> None:
        """Raise if this end is being closed, so that nothing may be waited for on it.

        Raises:
            ClosedError: it is.
        """
        if self._stopped:
            raise ClosedError(f"{self._name} is being closed")

    def close(self, deadline: Deadline) -> None:
        """End the worker and give the transport's end back; what is unfinished stays so."""
        with self._lock:
            self._stopped = True
            self._work.notify()
        with self._notes_lock:
            while self._held_notes:
                close_all(self._held_notes.popleft()[1])
        if self._has_work():
            self.abort(ClosedError(f"{self._name} is being closed"))
        if self._thread is not None:
            self._thread.join(max(deadline.remaining_s, _GRACE_S))
        if self._end is not None and not (self._thread and self._thread.is_alive()):
            give_back(self._name, self._end.close, deadline)

    @abstractmethod
    def _has_work(self) -> bool:
        """Whether something has begun; asked with the lock held."""

    @abstractmethod
    def _finish_head(self) -> None:
        """Finish the oldest; called without the lock."""

    def _call_worker(self) -> None:
        """Wake the worker, with the lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._work.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._stopped and not self._has_work():
                    self._work.wait()
                if self._stopped:
                    return
            try:
                self._finish_head()
            except (ClosedError, PeerClosedError):
                # The one who closes reports what was not delivered; nobody else is harmed by it.
                with self._lock:
                    self.given_up = True
                self._changed()
                return
            except StagelinkError as error:
                self._fail(error)
                return
            except Exception as error:
                self._fail(mapped(self._name, error))
                return


def give_back(what: str, close: Callable[[Deadline], None], deadline: Deadline) -> None:
    """Call a ``close`` of a transport's.

    Raises:
        StagelinkError: it raised; see `mapped`.
    """
    try:
        close(deadline)
    except Exception as error:
        raise_mapped(f"closing {what}", error)


def raise_mapped(what: str, error: BaseException) -> NoReturn:
    """Raise `mapped`; but as it is what a signal handler raised while the transport was at work.

    Raises:
        BaseException: always.
    """
    if isinstance(error, StagelinkError) or stops_caller(error):
        raise error
    raise mapped(what, error) from error


def mapped(what: str, error: BaseException) -> StagelinkError:
    """A transport's exception as an error of this library's, with the exception as its cause."""
    if isinstance(error, StagelinkError):
        return error
    mapped = TransportError(f"{what}: {type(error).__name__}: {error}")
    mapped.__cause__ = error
    return mapped
