"""The sending end of one link: which message begins when, and when it is copied.

One lock makes the order of ``begin`` the order of the headers on the wire. A message that finds
others queued queues behind them, it never begins past them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident

import torch

from stagelink.errors import PeerClosedError, StagelinkError, TransportError
from stagelink.links.calls import raise_mapped
from stagelink.links.completion import Begun
from stagelink.links.link_end import LinkEnd
from stagelink.transport.contract import Capabilities, Link, Message, Sender
from stagelink.transport.header import Header
from stagelink.transport.modes import outside_modes
from stagelink.transport.streams import Stream, StreamEvent

_MOST_ASKED = 100
"""How often in turn a ``begin`` may say that it has made room, and find none."""


class SendJob:
    """One message on its way out."""

    __slots__ = ("announced", "event", "finished", "header", "payload", "private")

    def __init__(
        self, header: Header, payload: torch.Tensor | bytes | None, *, private: bool = False
    ) -> None:
        self.header = header
        # flat uint8, or as bytes what travels inline; None once nobody needs it
        self.payload = payload
        self.private = private  # whether the payload is in memory that nobody else knows
        self.announced = False  # whether the peer has been told that it comes
        self.finished = False  # whether the caller's memory is needed no more
        # when the payload is there, on a device with streams
        self.event: StreamEvent | None = None


class OutLink(LinkEnd[SendJob]):
    """The sending end of one link.

    Args:
        announce: sends a header with a note and descriptors to the peer.
        stream: makes copies of payloads; what is done is queued there.
        changed: called when a job is finished.
        fail: see `LinkEnd`.
    """

    _DOING = "sending on"

    def __init__(
        self,
        link: Link,
        capabilities: Capabilities,
        announce: Callable[[Header, bytes, Sequence[int]], None],
        stream: Stream,
        changed: Callable[[], None],
        fail: Callable[[StagelinkError], None],
    ) -> None:
        super().__init__(link, stream, fail, changed)
        self._sender: Sender | None = None
        self._capabilities = capabilities
        self._announce = announce
        self._room_meanwhile = False
        self._queue: deque[SendJob | Callable[[], None]] = deque()

    def opened(self, sender: Sender) -> None:
        """The transport's end is there: begin what was queued for it."""
        self._opened(sender)
        self._sender = sender
        self.room()

    def submit(self, job: SendJob, *, copy: bool) -> None:
        """Begin a message now or as soon as there is room; waits for nobody.

        With ``copy`` its caller may overwrite the payload as soon as this returns. It is for the
        caller to fail the handler where this raises: the transport failed in ``begin``.
        """
        copied_later = not copy or self._capabilities.copies_on_begin
        if job.event is None and not (self._on_host and copied_later):
            # Else it was parked, and this is not its caller's thread; or there is nothing to do.
            self.detach(job, copy=not copied_later)
        with self._lock:
            self.unfinished += 1
            if self._queue or not self._begin(job):
                if copy and self._capabilities.copies_on_begin:
                    self.detach(job, copy=True)
                self._queue.append(job)
            done: list[SendJob] = []
            if self.was_told and self.beginning is None:
                done = self._pump() if self._queue else self._take_told()
        if done:
            self._changed()
        if self.was_told:
            self._catch_up()

    def when_announced(self, action: Callable[[], None]) -> None:
        """Run ``action`` once all that was submitted so far is announced; perhaps at once."""
        with self._lock:
            waits = bool(self._queue) or not self._all_announced
            if waits:
                self._queue.append(action)
        if not waits:
            action()
        if self.was_told:
            self._catch_up()

    @property
    def _all_announced(self) -> bool:
        return all(begun.message.announced for begun in self._begun)

    def _announce_once(self, job: SendJob, note: bytes = b"", fds: Sequence[int] = ()) -> None:
        if job.announced:
            raise TransportError(f"{self._name}: a message is announced twice")
        self._announce(job.header, note, fds)
        job.announced = True
        beginning = self.beginning
        if beginning is None or beginning[0] != get_ident():
            self.told(None)  # also where nothing is queued: an action may be on its way there

    def room(self) -> None:
        """The transport has room again: begin what is queued."""
        if self.begins_here:  # out of its own begin
            self._room_meanwhile = True
        else:
            self.told(None)

    def end_peer(self, cause: PeerClosedError) -> None:
        """The peer has gone for good: what is unfinished stays so. Returns at once."""
        with self._lock:
            self.given_up = True
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
                job.payload = self.stream.cloned(job.payload)
            job.event = self.stream.record_caller()

    def _pump(self) -> list[SendJob]:
        done = self._take_told()
        while self._queue:
            item = self._queue[0]
            if isinstance(item, SendJob):
                if not self._begin(item):
                    break
                self._queue.popleft()
                done += self._take_told()
            elif self._all_announced:
                self._queue.popleft()
                item()
            else:
                break
        return done

    def _begin(self, job: SendJob) -> bool:
        sender = self._sender
        if sender is None or not isinstance(job.payload, torch.Tensor) or self.given_up:
            return False
        if len(self._begun) >= self._capabilities.in_flight:
            return False
        if self.beginning is not None:  # in a ``begin`` that has led here
            self.was_told.append((None, None, None))
            return False
        for _ in range(_MOST_ASKED):
            self._room_meanwhile = False
            if self._ask_to_begin(sender, job, job.payload):
                return True
            if not self._room_meanwhile:
                return False
        raise TransportError(
            f"{self._name}: its begin finds no room, and says by port.room() that there is, "
            f"{_MOST_ASKED} times in turn"
        )

    def _ask_to_begin(self, sender: Sender, job: SendJob, payload: torch.Tensor) -> bool:
        begun, message = Begun(self, job), Message(job.header, payload)
        self.beginning = get_ident(), begun
        try:
            with outside_modes() if self._on_host else self.stream.entered(job.event):
                taken: object = sender.begin(message, partial(self._announce_once, job), begun)
        except Exception as error:
            raise_mapped(self._name, error)
        finally:
            self.beginning = None
        if taken is True:
            self._begun.append(begun)
            return True
        if taken is not False:
            raise TransportError(
                f"{self._name}: its begin returns {taken!r}, where True or False is due"
            )
        if job.announced or begun.at_once:
            raise TransportError(
                f"{self._name}: its begin returns False, as if there were no room, after it has "
                + ("announced" if job.announced else "said that the message is done")
            )
        return False

    def _take(self, message: SendJob, payload: torch.Tensor | None) -> None:
        del payload
        if not message.announced:
            raise TransportError(f"{self._name}: a message is done and was not announced")
        message.payload = None
        message.finished = True

    def _tell(self, done: list[SendJob]) -> None:
        if done:
            self._changed()
