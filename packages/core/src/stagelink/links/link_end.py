"""Common part of a link's two ends: opening, notes, watched descriptors and the end."""

from __future__ import annotations

import _thread
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, TypeVar

from stagelink.control.connection import close_all
from stagelink.control.reader import Reader
from stagelink.deadline import Deadline
from stagelink.errors import ClosedError, PeerClosedError, StagelinkError
from stagelink.links.calls import GRACE_S, give_back, mapped, raise_mapped
from stagelink.links.completion import Completion
from stagelink.transport.contract import Link, Receiver, Sender
from stagelink.transport.modes import outside_modes
from stagelink.transport.streams import HostStream, Stream

logger = logging.getLogger("stagelink")
_T = TypeVar("_T")


class LinkEnd(Completion[_T]):
    """Common part of both ends.

    Args:
        link: what it connects.
        stream: where what is done is queued.
        fail: called with what went wrong; blocks for a moment. Raises PeerClosedError where that
            is none of the pipeline's failures.
        changed: called when waiting callers should look again.
    """

    _DOING: ClassVar[str]

    def __init__(
        self,
        link: Link,
        stream: Stream,
        fail: Callable[[StagelinkError], None],
        changed: Callable[[], None],
    ) -> None:
        super().__init__(f"{self._DOING} {link}")
        self.link = link
        self.stream = stream
        self.error: StagelinkError | None = None  # what went wrong, if anything did
        self._on_host = type(stream) is HostStream
        self._fail = fail
        self._changed = changed
        self._notes_lock = threading.RLock()
        self._cause: StagelinkError | None = None
        self._held_notes: deque[tuple[bytes, Sequence[int]]] = deque()
        self._end: Sender | Receiver | None = None
        self._unwatches: dict[int, Callable[[], None]] = {}
        self._stopped = False

    def _fail_soon(self, error: BaseException) -> None:
        """Fail the handler; returns at once, as the transport may be anywhere when it says so."""
        failure = mapped(str(self.link), error)
        if isinstance(failure, ClosedError | PeerClosedError):
            self._give_up()
            return
        self.error = failure
        try:
            # Below `threading`, whose threads tell when they have begun: this must not block.
            _thread.start_new_thread(self._fail_or_give_up, (failure,))
        except RuntimeError:  # there is no memory for one
            self._fail_or_give_up(failure)

    def _fail_or_give_up(self, failure: StagelinkError) -> None:
        try:
            self._fail(failure)
        except (ClosedError, PeerClosedError):
            self._give_up()

    def _give_up(self) -> None:
        # The one who closes reports what was not delivered; nobody else is harmed by it.
        self.given_up = True
        self._changed()

    # -- what it is told

    def note(self, note: bytes, fds: Sequence[int]) -> None:
        """A note from the twin; held until this end is open. Runs on the reading thread."""
        with self._notes_lock:
            if self._stopped:
                close_all(fds)
            elif self._end is None:
                self._held_notes.append((note, fds))
            else:
                self._give_note(self._end, note, fds)

    def _give_note(self, end: Sender | Receiver, note: bytes, fds: Sequence[int]) -> None:
        try:
            with outside_modes():
                end.on_note(note, fds)
        except Exception as error:
            raise_mapped(f"{self.link}: a note", error)

    def _opened(self, end: Sender | Receiver) -> None:
        with self._notes_lock:
            if self._stopped:  # it took longer than its opener would wait
                end.close(Deadline(GRACE_S))
                return
            self._end = end
            cause, self._cause = self._cause, None
            while self._held_notes:
                self._give_note(end, *self._held_notes.popleft())
        if cause is not None:  # it came while this end was being opened
            self.abort(cause)

    def abort(self, cause: StagelinkError) -> None:
        """Give up what is on its way: the handler failed, or the peer has gone for good.

        Returns at once. What the transport raises is logged: there is an error already.
        """
        self.given_up = True
        with self._notes_lock:
            end = self._end
            if end is None:  # else it is not kept: its traceback would keep what the link holds
                self._cause = cause
        if end is not None:
            try:
                end.abort(cause)
            except Exception as error:
                logger.warning("%s: aborting it: %s: %s", self.link, type(error).__name__, error)

    def watch(
        self, reader: Reader, fd: int, action: Callable[[], bool], *, writable: bool
    ) -> None:
        """Have a descriptor of the transport's watched, until `unwatch` or `close`.

        Raises `OSError` where it is none that can be, and as `check_open`.
        """
        with self._notes_lock:
            self.check_open()
            watch = reader.watch(fd, action, self._fail_soon, writable=writable)
            replaced = self._unwatches.pop(fd, None)
            self._unwatches[fd] = partial(reader.unwatch, watch)
        if replaced is not None:
            replaced()

    def unwatch(self, fd: int) -> None:
        """End a `watch`; idempotent. Waits for an action that runs on another thread."""
        with self._notes_lock:  # `watch` may have begun, and not have come as far as to note it
            unwatch = self._unwatches.pop(fd, None)
        if unwatch is not None:
            unwatch()

    def check_open(self) -> None:
        """Raise `ClosedError` if this end is being closed: nothing may be waited for on it."""
        if self._stopped:
            raise ClosedError(f"{self.link} is being closed")

    def close(self, deadline: Deadline) -> None:
        """Give the transport's end back; what is unfinished stays so."""
        with self._lock:  # a ``begin`` has returned, and none comes any more
            self._stopped = self.given_up = True
        with self._notes_lock:
            while self._held_notes:
                close_all(self._held_notes.popleft()[1])
        for fd in tuple(self._unwatches):
            self.unwatch(fd)
        self._changed()  # a thread of the transport's that waits by its port
        if self._begun:
            self.abort(ClosedError(f"{self.link} is being closed"))
        if self._end is not None:
            give_back(str(self.link), self._end.close, deadline, self.stream)
