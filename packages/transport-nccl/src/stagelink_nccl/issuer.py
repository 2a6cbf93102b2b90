"""The one thread of a process that calls NCCL.

NCCL forbids operations on one device from several threads, also where they belong to different
communicators. Everybody else only says what is to be done; and this thread does one thing at a
time, while both ranks of it hold their slots.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from stagelink_nccl.slot import IssueSlot, SlotUser

if TYPE_CHECKING:
    from stagelink.transport.contract import Deadline

__all__ = ["Issuer", "Task"]

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_GRACE_S = 0.2
_BROKEN_S = 2.0
"""How long a failed handler waits for what may be stuck."""

_only_one = threading.Lock()


class Task(SlotUser):
    """One end of a link as the issuing thread sees it.

    Attributes:
        order: of all links the same on both ranks.
    """

    order: tuple[int, ...]

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer

    def run(self) -> None:
        """Have the issuing thread do the oldest operation."""
        self._issuer.wake(self)

    @abstractmethod
    def issue(self) -> Callable[[], object]:
        """Do the oldest operation, to its end; on the issuing thread, never raises.

        Returns:
            What to call when the slot is free again.
        """

    @abstractmethod
    def dispose(self, *, broken: bool) -> None:
        """Give the group back; on the issuing thread, never raises.

        Args:
            broken: an operation may be in flight whose other rank never comes.
        """


class Issuer:
    """The issuing thread of one handler; it starts with the first link.

    Attributes:
        lock: held for each call of `slot` and of `wake`.
        slot: this process's.
        ended: whether it issues nothing any more.
    """

    def __init__(self) -> None:
        # Taken as it is: a signal handler may raise inside a condition that is entered.
        self.lock = threading.RLock()
        self.slot = IssueSlot()
        self._work = threading.Condition(self.lock)
        self._next: Task | None = None
        self._tasks: list[Task] = []
        self._thread: threading.Thread | None = None
        self.ended = False
        self._broken = False

    def start(self) -> None:
        """Start the thread, unless it runs.

        Raises:
            RuntimeError: another handler of this process has one.
        """
        with self.lock:
            if self._thread is not None:
                return
            if not _only_one.acquire(blocking=False):
                raise RuntimeError(
                    "another handler of this process uses nccl, or was closed while NCCL was "
                    "stuck in it, and NCCL wants one thread; close that handler first, or start "
                    "a new process"
                )
            self._thread = threading.Thread(
                target=self._run, name="stagelink-nccl-issue", daemon=True
            )
            self._thread.start()

    def add(self, task: Task) -> None:
        """A link is open.

        Raises:
            ConnectionAbortedError: too late; its group was given back.
        """
        with self.lock:
            if not self.ended:
                self._tasks.append(task)
                return
        task.dispose(broken=True)
        raise ConnectionAbortedError("the handler failed, or was closed, meanwhile")

    def wake(self, task: Task) -> None:
        """Both slots are held for a link; called with the lock held."""
        self._next = task
        self._work.notify()

    def looks(self) -> Iterator[None]:
        """Yield when to look at an operation: often at first; no more once this ends."""
        pause_s = _SHORTEST_PAUSE_S
        while not self.ended:
            yield
            with self.lock:
                self._work.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def abort(self) -> None:
        """The handler failed: no operation begins any more, and the groups are broken."""
        with self.lock:
            self._broken = True
            self._end()

    def close(self, deadline: Deadline) -> None:
        """End the thread, which gives the groups back, by the deadline."""
        with self.lock:
            self._end()
            thread, broken = self._thread, self._broken
        if thread is None or not thread.is_alive():  # a signal may prevent its start
            return
        patience_s = max(deadline.remaining_s, _GRACE_S)
        thread.join(min(patience_s, _BROKEN_S if broken else threading.TIMEOUT_MAX))
        if thread.is_alive():
            logger.warning("the issuing thread is stuck in NCCL, and is left there")

    def _end(self) -> None:
        self.ended = True
        self.slot.stop()
        self._work.notify()

    def _run(self) -> None:
        try:
            while (task := self._take()) is not None:
                then = task.issue()
                with self.lock:
                    self.slot.done(task)
                then()
            with self.lock:
                # All ranks in one order: to give a communicator back takes both its ranks.
                tasks = sorted(self._tasks, key=lambda task: task.order)
                self._tasks.clear()
            for task in tasks:
                task.dispose(broken=self._broken)
        finally:
            _only_one.release()

    def _take(self) -> Task | None:
        with self.lock:
            while self._next is None and not self.ended:
                self._work.wait()
            task, self._next = self._next, None
            return None if self.ended else task
