"""The sending end of one link: who begins when, who finishes, and who copies.

One lock makes the order of ``begin`` the order of the headers on the wire. A message that finds
others queued queues behind them, it never begins past them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from stagelink.errors import PeerClosedError, StagelinkError, TransportError
from stagelink.links.link_end import FOREVER, LinkEnd, raise_mapped
from stagelink.transport.contract import Link, Message, Pending, Ready
from stagelink.transport.interrupts import stops_caller

if TYPE_CHECKING:
    from stagelink.transport.contract import Capabilities, Sender
    from stagelink.transport.header import Header
    from stagelink.transport.lanes import Lane, Moment

__all__ = ["OutLink", "SendJob"]

_MOST_ASKED = 100
"""How often in turn a ``begin`` may say that it has made room, and find none."""


class SendJob:
    """One message on its way out.

    Attributes:
        header: what it is.
        payload: its bytes, flat uint8, or as bytes what travels inline; None once nobody needs
            them, and for a message without.
        private: whether the payload is in memory that nobody else knows.
        announced: whether the peer has been told that it comes.
        finished: whether the caller's memory is needed no more.
        moment: when the payload is there, on a device with streams; else None.
    """

    __slots__ = ("announced", "finished", "header", "moment", "payload", "private")

    def __init__(
        self, header: Header, payload: torch.Tensor | bytes | None, *, private: bool = False
    ) -> None:
        self.header = header
        self.payload = payload
        self.private = private
        self.announced = False
        self.finished = False
        self.moment: Moment | None = None


class _Begun(NamedTuple):
    pending: Pending
    job: SendJob


class OutLink(LinkEnd):
    """The sending end of one link.

    Args:
        link: what it connects.
        capabilities: of its transport.
        announce: sends a header with a note and descriptors to the peer.
        lane: makes copies of payloads; what is done is queued there.
        changed: called when a job is finished.
        fail: see `LinkEnd`.

    Attributes:
        unfinished: how many messages are queued or under way.
    """

    def __init__(
        self,
        link: Link,
        capabilities: Capabilities,
        announce: Callable[[Header, bytes, Sequence[int]], None],
        lane: Lane,
        changed: Callable[[], None],
        fail: Callable[[StagelinkError], None],
    ) -> None:
        super().__init__(link, "send", lane, fail, changed)
        self._sender: Sender | None = None
        self._capabilities = capabilities
        self._announce = announce
        self._telling = threading.Lock()
        self._finishing: int | None = None
        self._told_meanwhile: deque[None] = deque()
        self._room_meanwhile = False
        self._queue: deque[SendJob | Callable[[], None]] = deque()
        self._begun: deque[_Begun] = deque()

    def opened(self, sender: Sender) -> None:
        """The transport's end is there: begin what was queued for it."""
        self._opened(sender)
        with self._lock:
            self._sender = sender
            self._pump()
        self._catch_up()

    def submit(self, job: SendJob, *, copy: bool) -> None:
        """Begin a message now or as soon as there is room; waits for nobody.

        Args:
            job: the message.
            copy: the caller may overwrite the payload as soon as this returns.

        Raises:
            StagelinkError: the transport failed in ``begin``; it is for the caller to fail the
                handler.
        """
        if job.moment is None:  # else it was parked, and this is not its caller's thread
            self.detach(job, copy=copy and not self._capabilities.copies_on_begin)
        with self._lock:
            self.unfinished += 1
            if self._queue or not self._begin(job):
                if copy and self._capabilities.copies_on_begin:
                    self.detach(job, copy=True)
                self._queue.append(job)
        self._catch_up()

    def when_announced(self, action: Callable[[], None]) -> None:
        """Run ``action`` once all that was submitted so far is announced; perhaps at once."""
        with self._lock:
            if self._queue or not self._all_announced:
                self._queue.append(action)
                return
        action()

    @property
    def _all_announced(self) -> bool:
        return all(begun.job.announced for begun in self._begun)

    def room(self) -> None:
        """The transport has room again, or the one before has finished: begin what is queued."""
        if self.begins_here:  # out of its own begin, which has the lock
            self._room_meanwhile = True
            return
        try:
            with self._lock:
                self._pump()
            self._catch_up()
        except StagelinkError as error:
            if stops_caller(error):
                raise
            with suppress(PeerClosedError):
                self._fail(error)

    def end_peer(self, cause: PeerClosedError) -> None:
        """The peer has gone for good: what is unfinished stays so. Returns at once."""
        with self._lock:
            self.peer_ended = True
            under_way = bool(self._begun)
        if under_way:
            self.abort(cause)

    @property
    def dtypes(self) -> frozenset[str] | None:
        """Names of the only element types that the transport carries; None: every one."""
        return self._capabilities.dtypes

    def detach(self, job: SendJob, *, copy: bool) -> None:
        """Have a message begin after what its caller has queued so far, with a copy if asked."""
        if isinstance(job.payload, torch.Tensor):
            if copy and not job.private:
                job.payload = self.lane.kept(job.payload)
            job.moment = self.lane.callers_moment()

    def _pump(self) -> None:
        while self._queue:
            item = self._queue[0]
            if isinstance(item, SendJob):
                if not self._begin(item):
                    return
                self._queue.popleft()
            elif self._all_announced:
                self._queue.popleft()
                item()
            else:  # what has begun announces itself in its finish
                return

    def _begin(self, job: SendJob) -> bool:
        if self._sender is None or not isinstance(job.payload, torch.Tensor) or self.peer_ended:
            return False
        if len(self._begun) >= self._capabilities.in_flight:
            return False
        pending = self._ask_to_begin(self._sender, job, job.payload)
        if pending is None:
            return False
        if isinstance(pending, Ready):
            self._done(job)
        else:
            self._begun.append(_Begun(pending, job))
            if not self._sender.tells_sent:
                self._call_worker()
        return True

    def _ask_to_begin(self, sender: Sender, job: SendJob, payload: torch.Tensor) -> Pending | None:
        message = Message(job.header, payload)
        announce = partial(self._announce_once, job)
        for _ in range(_MOST_ASKED):
            self._room_meanwhile = False
            self._begins = threading.get_ident()
            try:
                with self.lane.entered(job.moment):
                    pending: object = sender.begin(message, announce)
            except Exception as error:
                raise_mapped(f"sending on {self.link}", error)
            finally:
                self._begins = None
            if pending is None and not job.announced and self._room_meanwhile:
                continue  # it made room itself
            if pending is None and not job.announced:
                return None
            if isinstance(pending, Pending) and (job.announced or not isinstance(pending, Ready)):
                return pending
            raise TransportError(f"sending on {self.link}: {_misbegun(job, pending)}")
        raise TransportError(
            f"sending on {self.link}: its begin finds no room, and says by port.room() that there "
            f"is, {_MOST_ASKED} times in turn"
        )

    def _announce_once(self, job: SendJob, note: bytes = b"", fds: Sequence[int] = ()) -> None:
        if job.announced:
            raise TransportError(f"sending on {self.link}: a message is announced twice")
        self._announce(job.header, note, fds)
        job.announced = True

    def _done(self, job: SendJob) -> None:
        job.payload = None
        job.finished = True
        self.unfinished -= 1
        self._changed()

    def _has_work(self) -> bool:
        return bool(self._begun)

    @property
    def idle(self) -> bool:
        """As `LinkEnd.idle`; where the transport tells what is sent, nobody is waiting for it."""
        return (self._sender is not None and self._sender.tells_sent) or super().idle

    def finish_oldest(self) -> None:
        """Finish the oldest message on this thread, where the transport says that it may.

        Raises:
            StagelinkError: the transport failed.
        """
        if self._sender is not None and not self._sender.tells_sent:
            raise TransportError(f"{self.link}: port.sent() of a Sender without tells_sent")
        if self.begins_here or self._finishing == threading.get_ident():
            self._told_meanwhile.append(None)  # `_catch_up` has it done, without the locks
            return
        with self._telling:
            with self._lock:  # the peer may have answered before ``begin`` has returned here
                begun = bool(self._begun) and not (self._stopped or self.peer_ended)
            if begun:
                self._finishing = threading.get_ident()
                try:
                    self._finish_head()
                finally:
                    self._finishing = None
        self._catch_up()

    def _catch_up(self) -> None:
        """Finish what the transport has told of out of a call of core's own."""
        while self._told_meanwhile:
            self._told_meanwhile.popleft()
            self.finish_oldest()

    def _finish_head(self) -> None:
        pending, job = self._begun[0]
        try:
            with self.lane.entered():
                pending.finish(FOREVER)
        except Exception as error:
            raise_mapped(f"sending on {self.link}", error)
        if self.peer_ended:  # it may have returned since it was aborted
            raise PeerClosedError(f"{self.link}: the receiver had gone")
        if not job.announced:
            raise TransportError(
                f"sending on {self.link}: a message has finished and was not announced"
            )
        with self._lock:
            self._begun.popleft()
            self._done(job)
            self._pump()


def _misbegun(job: SendJob, pending: object) -> str:
    """What is wrong with what a ``begin`` returned, in words."""
    if pending is None:
        return "its begin returns None, as if there were no room, after it has announced"
    if not isinstance(pending, Pending):
        return f"its begin returns {pending!r}, where a Pending or None is due"
    return "its begin returns a message as finished that it has not announced"
