"""What both ends of a link share inside core: notes, and the thread that finishes messages.

A worker thread finishes in the order of ``begin``; it is started on first use, and not at all
where nothing is left to finish.
"""

from __future__ import annotations

import _thread
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch

from stagelink.control.connection import close_all
from stagelink.deadline import Deadline
from stagelink.errors import ClosedError, PeerClosedError, StagelinkError, TransportError
from stagelink.transport.interrupts import stops_caller

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stagelink.transport.contract import Link, Receiver, Sender
    from stagelink.transport.lanes import Lane

__all__ = ["FOREVER", "LinkEnd", "give_back", "mapped", "raise_mapped"]

logger = logging.getLogger("stagelink")

_GRACE_S = 0.2
"""What a step of closing gets when those before it have used up the time."""

FOREVER = Deadline(float("inf"))
"""How long a worker may wait: death, abort and close end it; callers have deadlines of theirs."""


class LinkEnd(ABC):
    """What both ends share: notes, and the worker, started when there is something to finish.

    Args:
        link: what it connects.
        verb: what it does: ``"send"`` or ``"recv"``.
        lane: where what is done is queued.
        fail: called with what went wrong on the worker; raises PeerClosedError where that is none
            of the pipeline's failures.
        changed: called when the worker gives up.

    Attributes:
        link: as given.
        unfinished: how many messages are on their way through this end.
        given_up: whether the worker has ended since its peer, or this rank, closed.
        error: what went wrong on the worker, if anything did.
        peer_ended: whether nothing reaches the peer any more, nor comes from it.
        lane: as given.
    """

    unfinished = 0

    def __init__(
        self,
        link: Link,
        verb: str,
        lane: Lane,
        fail: Callable[[StagelinkError], None],
        changed: Callable[[], None],
    ) -> None:
        self.link = link
        self.lane = lane
        self.peer_ended = False
        self._changed = changed
        self._notes_lock = threading.RLock()
        self._held_notes: deque[tuple[bytes, Sequence[int]]] = deque()
        self._end: Sender | Receiver | None = None
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._name = f"stagelink-{verb}-{link.source}-{link.target}-{link.transport}"
        self._fail = fail
        self._stopped = False
        self._begins: int | None = None
        self.given_up = False
        self.error: StagelinkError | None = None
        self._thread: threading.Thread | None = None

    def note(self, note: bytes, fds: Sequence[int]) -> None:
        """A note from the twin; held until this end is open. Runs on the reading thread."""
        with self._notes_lock:
            if self._stopped:
                close_all(fds)
            elif self._end is None:
                self._held_notes.append((note, fds))
            else:
                self._tell(self._end, note, fds)

    def _tell(self, end: Sender | Receiver, note: bytes, fds: Sequence[int]) -> None:
        try:
            end.on_note(note, fds)
        except StagelinkError:
            raise
        except Exception as error:
            raise mapped(f"{self.link}: a note", error) from error

    def _opened(self, end: Sender | Receiver) -> None:
        with self._notes_lock:
            if self._stopped:  # it took longer than whoever opened it would wait
                end.close(Deadline(_GRACE_S))
                return
            self._end = end
            while self._held_notes:
                self._tell(end, *self._held_notes.popleft())

    def abort(self, cause: StagelinkError) -> None:
        """Wake the worker, wherever it is: the handler failed, or the peer has gone for good.

        Returns at once. What the transport raises is logged: there is an error already.
        """
        with self._notes_lock:
            end = self._end
        if end is not None:
            try:
                end.abort(cause)
            except Exception as error:
                logger.warning("%s: aborting it: %s: %s", self.link, type(error).__name__, error)

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

    @property
    def begins_here(self) -> bool:
        """Whether this thread is in a ``begin`` of the transport's, which must not wait."""
        return self._begins == threading.get_ident()

    def check_open(self) -> None:
        """Raise if this end is being closed, so that nothing may be waited for on it.

        Raises:
            ClosedError: it is.
        """
        if self._stopped:
            raise ClosedError(f"{self.link} is being closed")

    def close(self, deadline: Deadline) -> None:
        """End the worker and give the transport's end back; what is unfinished stays so."""
        with self._lock:
            self._stopped = True
            self._work.notify()
        with self._notes_lock:
            while self._held_notes:
                close_all(self._held_notes.popleft()[1])
        if self._has_work():
            self.abort(ClosedError(f"{self.link} is being closed"))
        if self._thread is not None:
            self._thread.join(max(deadline.remaining_s, _GRACE_S))
        if self._end is not None and not (self._thread and self._thread.is_alive()):
            give_back(str(self.link), self._end.close, deadline, self.lane)

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
                self._finish_or_fail()
            except (ClosedError, PeerClosedError):
                # The one who closes reports what was not delivered; nobody else is harmed by it.
                with self._lock:
                    self.given_up = True
                self._changed()
                return

    def _finish_or_fail(self) -> None:
        try:
            self._finish_head()
        except (ClosedError, PeerClosedError):
            raise
        except BaseException as error:  # SystemExit as well: else its messages would just stay
            self.error = mapped(str(self.link), error)
            self._fail(self.error)
            raise ClosedError(f"{self.link} has failed") from error


def give_back(
    what: str, close: Callable[[Deadline], None], deadline: Deadline, lane: Lane | None = None
) -> None:
    """Call a ``close`` of a transport's, on a thread that is left behind where it does not return.

    Args:
        what: is closed.
        close: the call.
        deadline: for it; a moment is left where it has passed.
        lane: current on the thread; None: the caller's device is.

    Raises:
        TransportError: it did not return, or raised; see `mapped`.
    """
    errors: list[BaseException] = []
    here = _device_here() if lane is None else lane.entered
    taken, done = threading.Lock(), threading.Event()

    def call() -> None:
        if not taken.acquire(blocking=False):
            return
        try:
            with here():
                close(deadline)
        except BaseException as error:  # for the one who waits
            errors.append(error)
        done.set()

    try:
        # Below `threading`, whose `start` waits for a sign of a thread that may never begin: where
        # memory is short, or the interpreter ends, it is called here.
        _thread.start_new_thread(call, ())
        done.wait(_GRACE_S)
    except (RuntimeError, MemoryError) as error:
        logger.debug("closing %s: no thread for it: %s", what, error)
    call()
    if not done.wait(max(deadline.remaining_s, _GRACE_S) + _GRACE_S):
        raise TransportError(f"closing {what}: it has not returned by its deadline")
    if errors:
        raise_mapped(f"closing {what}", errors[0])


def _device_here() -> Callable[[], AbstractContextManager[object]]:
    """The caller's CUDA device as a context for another thread, where CUDA is in use."""
    if not torch.cuda.is_initialized():
        return nullcontext
    return partial(torch.cuda.device, torch.cuda.current_device())


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
