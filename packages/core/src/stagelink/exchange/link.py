"""The two ends of a link inside core: who begins when, who finishes, and on which thread.

One lock per end makes the order of ``begin`` the order of the headers on the wire. A message that
finds others queued queues behind them, it never begins past them. A worker thread finishes in the
order of ``begin``; it is started on first use, and not at all where nothing is left to finish.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from stagelink.errors import ClosedError, PeerClosedError, StagelinkError, TransportError
from stagelink.transport.contract import FINISHED, Deadline, Link, Message, Pending

if TYPE_CHECKING:
    import torch

    from stagelink.exchange.inbox import Arrival
    from stagelink.transport.buffers import BufferPool
    from stagelink.transport.contract import Capabilities, Receiver, Sender
    from stagelink.transport.header import Header

__all__ = ["InLink", "LinkEnd", "OutLink", "SendJob"]

_FOREVER = Deadline(float("inf"))


class LinkEnd(ABC):
    """What both ends share: notes, and the worker, started when there is something to finish.

    Attributes:
        unfinished: how many messages are on their way through this end.
    """

    unfinished = 0

    def __init__(self, name: str, fail: Callable[[StagelinkError], None]) -> None:
        self._notes_lock = threading.RLock()
        self._held_notes: deque[tuple[bytes, Sequence[int]]] = deque()
        self._end: Sender | Receiver | None = None
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._name = name
        self._fail = fail
        self._stopped = False
        self._given_up = False
        self._thread: threading.Thread | None = None

    def note(self, note: bytes, fds: Sequence[int]) -> None:
        """A note from the twin; held until this end is open. Runs on the reading thread."""
        with self._notes_lock:
            if self._end is None:
                self._held_notes.append((note, fds))
            else:
                self._end.on_note(note, fds)

    def _opened(self, end: Sender | Receiver) -> None:
        with self._notes_lock:
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
        """Whether nothing is being finished: what is unfinished will not be."""
        return self._given_up or not self._has_work()

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
        if self._has_work():
            self.abort(ClosedError(f"{self._name} is being closed"))
        if self._thread is not None:
            self._thread.join(deadline.remaining_s)
        if self._end is not None:
            self._end.close(deadline)

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
                    self._given_up = True
                return
            except StagelinkError as error:
                self._fail(error)
                return
            except Exception as error:
                self._fail(_mapped(self._name, error))
                return


def _mapped(what: str, error: BaseException) -> StagelinkError:
    if isinstance(error, StagelinkError):
        return error
    mapped = TransportError(f"{what}: {type(error).__name__}: {error}")
    mapped.__cause__ = error
    return mapped


class SendJob:
    """One message on its way out.

    Attributes:
        header: what it is.
        payload: its bytes, flat uint8; None once nobody needs them, and for a message without.
        started: whether the window has let it go.
        finished: whether the caller's memory is needed no more.
    """

    __slots__ = ("finished", "header", "payload", "started")

    def __init__(self, header: Header, payload: torch.Tensor | None) -> None:
        self.header = header
        self.payload = payload
        self.started = False
        self.finished = False


class _Begun(NamedTuple):
    pending: Pending
    job: SendJob


class OutLink(LinkEnd):
    """The sending end of one link.

    Args:
        link: what it connects.
        capabilities: of its transport.
        announce: sends a header with a note and descriptors to the peer.
        pool: where copies of payloads come from.
        changed: called when a job is finished.
        fail: called with what went wrong on the worker.

    Attributes:
        unfinished: how many messages are queued or under way.
    """

    def __init__(
        self,
        link: Link,
        capabilities: Capabilities,
        announce: Callable[[Header, bytes, Sequence[int]], None],
        pool: BufferPool,
        changed: Callable[[], None],
        fail: Callable[[StagelinkError], None],
    ) -> None:
        super().__init__(f"stagelink-send-{link.source}-{link.target}-{link.transport}", fail)
        self.link = link
        self.unfinished = 0
        self._sender: Sender | None = None
        self._capabilities = capabilities
        self._announce = announce
        self._pool = pool
        self._changed = changed
        self._queue: deque[SendJob | Callable[[], None]] = deque()
        self._begun: deque[_Begun] = deque()

    def opened(self, sender: Sender) -> None:
        """The transport's end is there: begin what was queued for it."""
        self._opened(sender)
        with self._lock:
            self._sender = sender
            self._pump()

    def submit(self, job: SendJob, *, copy: bool) -> None:
        """Begin a message now or as soon as there is room; waits for nobody.

        Args:
            job: the message.
            copy: the caller may overwrite the payload as soon as this returns.

        Raises:
            StagelinkError: the transport failed in ``begin``; it is for the caller to fail the
                handler.
        """
        if copy and not self._capabilities.copies_on_begin:
            self._keep_copy(job)
        with self._lock:
            self.unfinished += 1
            if self._queue or not self._begin(job):
                if copy and self._capabilities.copies_on_begin:
                    self._keep_copy(job)
                self._queue.append(job)

    def when_announced(self, action: Callable[[], None]) -> None:
        """Run ``action`` once all that was submitted so far is announced; perhaps at once."""
        with self._lock:
            if self._queue:
                self._queue.append(action)
                return
        action()

    def room(self) -> None:
        """The transport has room again, or the one before has finished: begin what is queued."""
        try:
            with self._lock:
                self._pump()
        except StagelinkError as error:
            self._fail(error)

    @property
    def dtypes(self) -> frozenset[str] | None:
        """Names of the only element types that the transport carries; None: every one."""
        return self._capabilities.dtypes

    def _keep_copy(self, job: SendJob) -> None:
        if job.payload is not None:
            job.payload = self._pool.take(job.payload.numel()).copy_(job.payload)

    def _pump(self) -> None:
        while self._queue:
            item = self._queue[0]
            if isinstance(item, SendJob):
                if not self._begin(item):
                    return
                self._queue.popleft()
            else:
                self._queue.popleft()
                item()

    def _begin(self, job: SendJob) -> bool:
        if self._sender is None or job.payload is None:
            return False
        if len(self._begun) >= self._capabilities.in_flight:
            return False
        header = job.header
        message = Message(header, job.payload)

        def announce(note: bytes = b"", fds: Sequence[int] = ()) -> None:
            self._announce(header, note, fds)

        try:
            pending = self._sender.begin(message, announce)
        except Exception as error:
            raise _mapped(f"sending on {self.link}", error) from error
        if pending is None:
            return False
        if pending is FINISHED:
            self._done(job)
        else:
            self._begun.append(_Begun(pending, job))
            self._call_worker()
        return True

    def _done(self, job: SendJob) -> None:
        job.payload = None
        job.finished = True
        self.unfinished -= 1
        self._changed()

    def _has_work(self) -> bool:
        return bool(self._begun)

    def _finish_head(self) -> None:
        pending, job = self._begun[0]
        try:
            pending.finish(_FOREVER)
        except Exception as error:
            raise _mapped(f"sending on {self.link}", error) from error
        with self._lock:
            self._begun.popleft()
            self._done(job)
            self._pump()


class _Received(NamedTuple):
    pending: Pending
    arrival: Arrival


class _Announced(NamedTuple):
    arrival: Arrival
    note: bytes
    fds: Sequence[int]


class InLink(LinkEnd):
    """The receiving end of one link.

    Args:
        link: what it connects.
        capabilities: of its transport.
        pool: where receive buffers come from.
        settled: called with each arrival whose payload is complete, on the thread that finished
            it.
        fail: called with what went wrong on the worker.
    """

    def __init__(
        self,
        link: Link,
        capabilities: Capabilities,
        pool: BufferPool,
        settled: Callable[[Arrival], None],
        fail: Callable[[StagelinkError], None],
    ) -> None:
        super().__init__(f"stagelink-recv-{link.source}-{link.target}-{link.transport}", fail)
        self.link = link
        self._receiver: Receiver | None = None
        self._capabilities = capabilities
        self._pool = pool
        self._settled = settled
        self._queue: deque[_Announced] = deque()
        self._begun: deque[_Received] = deque()
        self.unfinished = 0
        self._finishing = threading.Lock()

    def announced(self, arrival: Arrival, note: bytes, fds: Sequence[int]) -> None:
        """A header came in; runs on the reading thread, and returns at once.

        Raises:
            StagelinkError: the transport failed in ``begin``.
        """
        with self._lock:
            self.unfinished += 1
            self._queue.append(_Announced(arrival, note, fds))
            self._pump()

    def opened(self, receiver: Receiver) -> None:
        """The transport's end is there: begin what was held for it."""
        self._opened(receiver)
        with self._lock:
            self._receiver = receiver
            self._pump()

    @property
    def finishes_in_caller(self) -> bool:
        """Whether `drive` does the work, and not a worker."""
        return self._capabilities.caller_thread

    @property
    def drivable(self) -> bool:
        """Whether `drive` has something to finish."""
        return self._capabilities.caller_thread and bool(self._begun)

    def drive(self, deadline: Deadline) -> None:
        """Finish the oldest message in the caller's thread, where `finishes_in_caller`."""
        with self._finishing:
            if self._begun:
                self._finish_oldest(deadline)

    def drain(self) -> None:
        """Nobody will ask for some of what has begun: let the worker finish it."""
        with self._lock:
            if self._begun:
                self._call_worker()

    def _pump(self) -> None:
        while self._queue and self._receiver and len(self._begun) < self._capabilities.in_flight:
            self._begin(self._queue.popleft())

    def _begin(self, announced: _Announced) -> None:
        arrival, note, fds = announced
        header = arrival.header

        def accept() -> torch.Tensor:
            arrival.payload = self._pool.take(header.payload_bytes)
            return arrival.payload

        if self._receiver is None:
            return
        try:
            pending = self._receiver.begin(header, note, fds, accept)
        except Exception as error:
            raise _mapped(f"receiving on {self.link}", error) from error
        self._begun.append(_Received(pending, arrival))
        if not self._capabilities.caller_thread or arrival.abandoned:
            self._call_worker()

    def _has_work(self) -> bool:
        return bool(self._begun)

    def _finish_head(self) -> None:
        with self._finishing:
            if self._begun:
                self._finish_oldest(_FOREVER)

    def _finish_oldest(self, deadline: Deadline) -> None:
        pending, arrival = self._begun[0]
        try:
            payload = pending.finish(deadline)
        except Exception as error:
            raise _mapped(f"receiving on {self.link}", error) from error
        with self._lock:
            self._begun.popleft()
            self.unfinished -= 1
            self._pump()
        if payload is not None:
            arrival.payload = payload
        self._settled(arrival)
