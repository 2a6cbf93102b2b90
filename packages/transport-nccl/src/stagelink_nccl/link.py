"""The two ends of a link, and the notes by which an operation comes to be matched and issued.

The receiver tells the sender of each buffer that it has ready; when the message is there as well,
the sender knows that an operation is matched. It tells the receiver so if that is the lower rank,
which leads: see `stagelink_nccl.slot` for how it comes by both slots. In the end the receiver says
that it has the message: a sender that left as soon as NCCL is done on its side could take memory
away that the other still reads.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from stagelink.errors import PeerClosedError
from stagelink.transport.blocking import Finisher, synchronize
from stagelink.transport.contract import Receiver, Sender
from stagelink_nccl.issuer import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import Announce, Deadline, Done, Message, Port
    from stagelink.transport.header import Header
    from stagelink.transport.streams import Stream
    from stagelink_nccl.groups import Group
    from stagelink_nccl.issuer import Issuer

__all__ = ["NcclReceiver", "NcclSender"]

logger = logging.getLogger(__name__)

_BUFFER, _MATCHED, _RECEIVED, _GONE = b"buffer", b"matched", b"received", b"gone"
_ASK, _INSIST, _GRANTED, _BUSY = b"ask", b"insist", b"granted", b"busy"

_GRACE_S = 1.0
"""A peer may have closed when it was through with an operation that is not yet through here."""

_AT_ONCE = timedelta(seconds=1)


class NcclSender(Sender):
    """The sending end.

    Args:
        port: of the link.
        group: of the link.
        issuer: of this process.
        stream: where operations are issued; nothing else is queued there.
        eager: connect at once.
    """

    def __init__(
        self, port: Port, group: Group, issuer: Issuer, stream: Stream, *, eager: bool
    ) -> None:
        self._port = port
        self._issuer = issuer
        self._task = _LinkTask(port, group, issuer, stream)
        self._unreceived: deque[Done] = deque()
        self._finisher = Finisher(port)
        if eager:
            self._task.post(Operation(port.stream.buffer(1)))
            self._task.message_ready()

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """Announce it; the operation is issued when both ends are ready."""
        announce()
        self._unreceived.append(done)
        # NCCL does nothing for no bytes, and the receiver must say that it has the message.
        payload = message.payload if message.header.payload_bytes else self._port.stream.buffer(1)
        self._task.post(Operation(payload))
        moment = self._port.stream.record()
        if moment is None or moment.reached:
            self._task.message_ready()
        else:
            self._finisher.submit(
                partial(synchronize, moment, self._port), _Ready(self._task, done)
            )
        return True

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """The receiver has a buffer, or a message; or it is about slots."""
        del fds
        if note == _BUFFER:
            self._task.buffer_ready()
        elif note == _RECEIVED:
            self._unreceived.popleft()()
        else:
            self._task.on_note(note)

    def abort(self, cause: BaseException) -> None:
        """Nothing is issued any more; on this link alone where only its receiver has gone."""
        if isinstance(cause, PeerClosedError):
            self._task.peer_is_gone()
        else:
            self._issuer.abort()

    def close(self, deadline: Deadline) -> None:
        """Let the peer go on without this end."""
        self._finisher.close(deadline)
        self._port.note(_GONE)


class NcclReceiver(Receiver):
    """The receiving end.

    Args:
        port: of the link.
        group: of the link.
        issuer: of this process.
        eager: connect at once.
    """

    def __init__(self, port: Port, group: Group, issuer: Issuer, *, eager: bool) -> None:
        self._port = port
        self._issuer = issuer
        self._task = _LinkTask(port, group, issuer, port.stream)
        if eager:
            self._task.post(Operation(port.stream.buffer(1)))
            port.note(_BUFFER)

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """Tell the sender that a buffer is there."""
        del note, fds
        buffer = accept()
        self._receive_into(buffer if header.payload_bytes else self._port.stream.buffer(1), done)

    def _receive_into(self, buffer: torch.Tensor, done: Done) -> None:
        self._task.post(Operation(buffer, partial(self._received, done)))
        self._port.note(_BUFFER)

    def _received(self, done: Done) -> None:
        self._port.note(_RECEIVED)
        done()

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """An operation is matched, or it is about slots."""
        del fds
        if note == _MATCHED:
            self._task.offer()
        else:
            self._task.on_note(note)

    def abort(self, cause: BaseException) -> None:
        """Have nothing issued any more."""
        del cause
        self._issuer.abort()

    def close(self, deadline: Deadline) -> None:
        """Let the peer go on without this end."""
        del deadline
        self._port.note(_GONE)


def _nothing() -> None:
    """At a sender the receiver's note says that an operation is done."""


class Operation(NamedTuple):
    """One message that the issuing thread is to send or receive.

    Attributes:
        tensor: what is sent or received into.
        then: what to do when it is through.
    """

    tensor: torch.Tensor
    then: Callable[[], object] = _nothing


class _Ready(NamedTuple):
    """A message's `Done` that a finisher tells of its payload being there, not yet received."""

    task: _LinkTask
    done: Done

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        del payload
        self.task.message_ready()

    def failed(self, error: BaseException) -> None:
        self.done.failed(error)


class _LinkTask(Task):
    """What both ends have in common: the operations in order, and the talk about slots."""

    def __init__(self, port: Port, group: Group, issuer: Issuer, stream: Stream) -> None:
        super().__init__(issuer)
        pair = (port.rank, port.peer)
        self.order = (min(pair), max(pair), port.link.source)
        self._port = port
        self._stream = stream
        self._group: Group | None = group
        self._operations: deque[Operation] = deque()
        self._messages = self._buffers = 0
        self._matching = threading.Lock()
        self._peer_gone_s = math.inf
        issuer.add(self)

    def post(self, operation: Operation) -> None:
        """One more operation, to be issued after those before it."""
        self._operations.append(operation)

    def message_ready(self) -> None:
        """At the sender: one more message is there."""
        with self._matching:
            self._messages += 1
            matched = self._messages <= self._buffers
        self._tell(matched=matched)

    def buffer_ready(self) -> None:
        """At the sender: one more buffer is there."""
        with self._matching:
            self._buffers += 1
            matched = self._buffers <= self._messages
        self._tell(matched=matched)

    def _tell(self, *, matched: bool) -> None:
        if matched and self._port.rank < self._port.peer:
            self.offer()
        elif matched:
            self._port.note(_MATCHED)

    def offer(self) -> None:
        """At the lower rank: one more operation is matched."""
        with self._issuer.lock:
            self._issuer.slot.offer(self)

    def ask(self, *, insists: bool) -> None:
        self._port.note(_INSIST if insists else _ASK)

    def answer(self, *, granted: bool) -> None:
        self._port.note(_GRANTED if granted else _BUSY)

    def on_note(self, note: bytes) -> None:
        """What the twin's `ask` or `answer` sent; or that it has closed."""
        if note == _GONE:
            self.peer_is_gone()
            return
        with self._issuer.lock:
            if note in (_ASK, _INSIST):
                self._issuer.slot.asked(self, insists=note == _INSIST)
            else:
                self._issuer.slot.answered(self, granted=note == _GRANTED)

    def issue(self) -> Callable[[], object]:
        operation = self._operations.popleft()
        try:
            self._do(operation.tensor)
        except Exception as error:
            if not self._issuer.ended and self._peer_gone_s == math.inf:
                self._port.fail(error)
            # Not before: the other rank would tell of a broken group, and be heard first.
            self.dispose(broken=True)
            return _nothing
        return operation.then

    def _do(self, tensor: torch.Tensor) -> None:
        if self._group is None:
            raise ConnectionError(f"{self._port.link}: its group was given up")
        with self._stream.entered():
            work = self._group.start(tensor)
            for _ in self._issuer.looks():
                if work.is_completed():
                    work.wait(_AT_ONCE)
                    return
                if time.monotonic() > self._peer_gone_s + _GRACE_S:
                    break
        raise ConnectionAbortedError(f"{self._port.link}: an operation was given up")

    def peer_is_gone(self) -> None:
        """Nothing is granted any more; what runs has a moment left, as it may be through there."""
        self._peer_gone_s = min(self._peer_gone_s, time.monotonic())
        with self._issuer.lock:
            self._issuer.slot.forget(self)

    def dispose(self, *, broken: bool) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        try:
            group.close(broken=broken)
        except Exception as error:
            logger.warning("%s: giving its group back: %s", self._port.link, error)
