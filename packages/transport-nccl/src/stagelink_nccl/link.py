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
from typing import TYPE_CHECKING

from stagelink.errors import PeerClosedError
from stagelink.transport.contract import FINISHED, Pending, Receiver, Sender
from stagelink.transport.lanes import reach
from stagelink_nccl.issuer import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import Announce, Deadline, Message, Port
    from stagelink.transport.header import Header
    from stagelink.transport.lanes import Lane, Moment
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
        lane: where operations are issued; nothing else is queued there.
        eager: connect at once.
    """

    def __init__(
        self, port: Port, group: Group, issuer: Issuer, lane: Lane, *, eager: bool
    ) -> None:
        self._port = port
        self._issuer = issuer
        self._task = _LinkTask(port, group, issuer, lane)
        self._sent = 0
        self._receipts = 0
        self._unready: deque[_Sent] = deque()
        self._looking = threading.Lock()
        if eager:
            self._task.post(Operation(self._task, port.lane.buffer(1)))
            self._task.message_ready()

    def begin(self, message: Message, announce: Announce) -> Pending:
        """Announce it; the operation is issued when both ends are ready."""
        announce()
        if not message.header.payload_bytes:
            return FINISHED
        operation = Operation(self._task, message.payload)
        self._task.post(operation)
        self._sent += 1
        sent = _Sent(self, operation, self._port.lane.moment(), self._sent)
        self._unready.append(sent)
        self._look()
        return sent

    def _look(self) -> None:
        """Tell of the messages that are there by now, in their order."""
        with self._looking:
            while self._unready and self._unready[0].is_there:
                self._unready.popleft()
                self._task.message_ready()

    def finish(self, sent: _Sent, deadline: Deadline) -> None:
        """See `Operation.finish`."""
        # On the host: an operation that is issued must wait for nothing but the other rank.
        reach(sent.moment, self._port, deadline)
        self._look()
        sent.operation.finish(deadline)
        self._look()
        if not self._port.wait(lambda: self._receipts >= sent.number, deadline):
            raise TimeoutError(f"{self._port.link}: no receipt within {deadline.seconds:g} s")

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """The receiver has a buffer, or a message; or it is about slots."""
        del fds
        if note == _BUFFER:
            self._task.buffer_ready()
        elif note == _RECEIVED:
            self._receipts += 1
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
        del deadline
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
        self._task = _LinkTask(port, group, issuer, port.lane)
        if eager:
            self._task.post(Operation(self._task, port.lane.buffer(1)))
            port.note(_BUFFER)

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
    ) -> Pending:
        """Tell the sender that a buffer is there."""
        del note, fds
        buffer = accept()
        return self._receive_into(buffer) if header.payload_bytes else FINISHED

    def _receive_into(self, buffer: torch.Tensor) -> Operation:
        operation = Operation(self._task, buffer, _RECEIVED)
        self._task.post(operation)
        self._port.note(_BUFFER)
        return operation

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """An operation is matched, or it is about slots."""
        del fds
        if note == _MATCHED:
            self._task.offer()
        else:
            self._task.on_note(note)

    def abort(self, cause: BaseException) -> None:
        """As `NcclSender.abort`."""
        del cause
        self._issuer.abort()

    def close(self, deadline: Deadline) -> None:
        """As `NcclSender.close`."""
        del deadline
        self._port.note(_GONE)


class Operation(Pending):
    """One message that the issuing thread is to send or receive.

    Args:
        task: its link.
        tensor: what is sent or received into.
        receipt: a note for the other end when it is done, or none.

    Attributes:
        done: set when the issuing thread is through with it.
        error: what went wrong, or None.
        tensor: as given; kept until it is done.
    """

    def __init__(self, task: _LinkTask, tensor: torch.Tensor, receipt: bytes = b"") -> None:
        self._task = task
        self.receipt = receipt
        self.tensor: torch.Tensor | None = tensor
        self.done = threading.Event()
        self.error: BaseException | None = None

    def finish(self, deadline: Deadline) -> None:
        """Wait until it is done; may be called again after a TimeoutError.

        Raises:
            TimeoutError: the deadline passed.
            StagelinkError: the handler failed, or the peer closed.
            Exception: what NCCL says.
        """
        self._task.wait_for(self, deadline)


class _Sent(Pending):
    """A message at its sender: when it is there, and the how manyth it is."""

    def __init__(
        self, sender: NcclSender, operation: Operation, moment: Moment | None, number: int
    ) -> None:
        self._sender = sender
        self.operation = operation
        self.moment = moment
        self.number = number

    @property
    def is_there(self) -> bool:
        """Whether the payload is, as the host sees it."""
        return self.moment is None or self.moment.reached

    def finish(self, deadline: Deadline) -> None:
        self._sender.finish(self, deadline)


class _LinkTask(Task):
    """What both ends have in common: the operations in order, and the talk about slots."""

    def __init__(self, port: Port, group: Group, issuer: Issuer, lane: Lane) -> None:
        super().__init__(issuer)
        pair = (port.rank, port.peer)
        self.order = (min(pair), max(pair), port.link.source)
        self._port = port
        self._lane = lane
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

    def wait_for(self, operation: Operation, deadline: Deadline) -> None:
        """See `Operation.finish`."""
        try:
            if not self._port.wait(operation.done.is_set, deadline):
                raise TimeoutError(f"{self._port.link}: not done within {deadline.seconds:g} s")
        except PeerClosedError:
            if not operation.done.wait(min(_GRACE_S, deadline.remaining_s)):
                self.peer_is_gone()
                raise
        if operation.error is not None:
            raise operation.error

    def issue(self) -> None:
        operation = self._operations.popleft()
        try:
            self._do(operation)
            if operation.receipt:
                self._port.note(operation.receipt)
        except Exception as error:
            operation.error = error
            known = self._peer_gone_s < math.inf or self._issuer.ended
            if not known:
                self._port.fail(error)
            # Not before: the other rank would tell of a broken group, and be heard first.
            self.dispose(broken=True)
        operation.tensor = None
        operation.done.set()
        self._port.wake()

    def _do(self, operation: Operation) -> None:
        if self._group is None or operation.tensor is None:
            raise ConnectionError(f"{self._port.link}: its group was given up")
        with self._lane.entered():
            work = self._group.start(operation.tensor)
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
