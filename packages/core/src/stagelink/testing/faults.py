"""Transports that go wrong on purpose: any transport, with faults at chosen messages of its links.

For tests of what surrounds a transport, and of conformance tests themselves. Small payloads travel
inside the header's message and meet no transport: set ``inline_bytes = 0``, or send larger ones.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stagelink.errors import UsageError
from stagelink.testing.ports import muted
from stagelink.transport.contract import FINISHED, Message, Pending, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.deadline import Deadline
    from stagelink.transport.contract import Announce, Link, Port, Transport
    from stagelink.transport.header import Header

__all__ = ["Corrupt", "Fail", "Gate", "Hold", "Point", "faulty"]


class Point(enum.Enum):
    """A call of core to a transport."""

    SEND_BEGIN = "Sender.begin"
    SEND_FINISH = "finish of the sender's pending"
    RECEIVE_BEGIN = "Receiver.begin"
    RECEIVE_FINISH = "finish of the receiver's pending"


class Gate:
    """Something to wait for: closed until `open` is called, then open for good."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = False

    def open(self) -> None:
        """Let everybody pass."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def nudge(self) -> None:
        """Have every waiter ask again whether it should go on waiting."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, deadline: Deadline, given_up: Callable[[], bool]) -> bool:
        """Block until the gate is open; False when the deadline passed or it was given up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._open or given_up(), min(deadline.remaining_s, 1e6)
            )
            return self._open


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """Where something goes wrong.

    Attributes:
        message: which of a link's messages it meets, from 0, in the order of ``begin``.
        link: (source, target) of the only link that has it; None: every link.
    """

    message: int
    link: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail(_Fault):
    """The call raises instead of doing its work.

    Attributes:
        at: the call.
        error: what it raises.
    """

    at: Point
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(_Fault):
    """The message is not through until a gate opens; if it never does, the message is lost.

    Attributes:
        at: one of the two ``finish`` calls.
        until: the gate. The deadline, and abort, end the wait with an error.

    Raises:
        UsageError: ``at`` is a ``begin``, which must not block.
    """

    at: Point
    until: Gate

    def __post_init__(self) -> None:
        if self.at in {Point.SEND_BEGIN, Point.RECEIVE_BEGIN}:
            raise UsageError(f"a message can be held in a finish, not in {self.at.value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt(_Fault):
    """The message arrives with one byte of its payload changed."""


def faulty(
    transport: type[Transport], *faults: Fail | Hold | Corrupt, name: str = "faulty"
) -> type[Transport]:
    """Make a transport that works as another one but for some faults.

    Args:
        transport: the one that does the work.
        faults: what goes wrong.
        name: the new transport's name, by which a plan asks for it.

    Returns:
        The class, to be registered as any other.
    """

    def open_sender(self: Transport, link: Link, port: Port, deadline: Deadline) -> Sender:
        sender = transport.open_sender(self, link, muted(port), deadline)
        return _Sender(sender, _Course(link, faults))

    def open_receiver(self: Transport, link: Link, port: Port, deadline: Deadline) -> Receiver:
        receiver = transport.open_receiver(self, link, port, deadline)
        return _Receiver(receiver, _Course(link, faults))

    attributes = {
        "__doc__": f"{transport.__name__} with faults.",
        "__module__": __name__,
        "name": name,
        # A held finish waits at its gate, not at the port.
        "capabilities": replace(transport.capabilities, caller_thread=False),
        "open_sender": open_sender,
        "open_receiver": open_receiver,
    }
    return type(f"Faulty{transport.__name__}", (transport,), attributes)


class _Course:
    """The faults that one end of one link meets, by the number of its messages."""

    def __init__(self, link: Link, faults: Sequence[Fail | Hold | Corrupt]) -> None:
        ends = (link.source, link.target)
        self._faults = [fault for fault in faults if fault.link in {None, ends}]
        self.aborted = False
        self.next = 0

    def meet(self, point: Point, message: int, deadline: Deadline | None = None) -> None:
        """Fail or wait if a fault is here."""
        for fault in self._of(message):
            match fault:
                case Fail(at=at, error=error) if at is point:
                    raise error
                case Hold(at=at, until=gate) if at is point and deadline is not None:
                    self._wait(gate, deadline)

    def has(self, message: int) -> bool:
        return bool(self._of(message))

    def corrupts(self, message: int) -> bool:
        return any(isinstance(fault, Corrupt) for fault in self._of(message))

    def abort(self) -> None:
        self.aborted = True
        for fault in self._faults:
            if isinstance(fault, Hold):
                fault.until.nudge()

    def _of(self, message: int) -> list[Fail | Hold | Corrupt]:
        return [fault for fault in self._faults if fault.message == message]

    def _wait(self, gate: Gate, deadline: Deadline) -> None:
        if gate.wait(deadline, lambda: self.aborted):
            return
        if self.aborted:
            raise ConnectionAbortedError("aborted while the message was held")
        raise TimeoutError(f"the message was held for {deadline.seconds:g} s")


@dataclass(frozen=True, slots=True)
class _Pending(Pending):
    inner: Pending
    course: _Course
    point: Point
    message: int
    payload: Any = None  # kept alive, where it is not core's own

    def finish(self, deadline: Deadline) -> torch.Tensor | None:
        self.course.meet(self.point, self.message, deadline)
        return self.inner.finish(deadline)


class _Sender(Sender):
    def __init__(self, inner: Sender, course: _Course) -> None:
        self._inner = inner
        self._course = course

    def begin(self, message: Message, announce: Announce) -> Pending | None:
        number = self._course.next
        self._course.meet(Point.SEND_BEGIN, number)
        if self._course.corrupts(number):
            message = replace(message, payload=_corrupted(message.payload))
        pending = self._inner.begin(message, announce)
        if pending is None:  # no room: the same message comes again
            return None
        self._course.next += 1
        if pending is FINISHED and not self._course.has(number):
            return FINISHED
        return _Pending(pending, self._course, Point.SEND_FINISH, number, message.payload)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self._inner.on_note(note, fds)

    def abort(self, cause: BaseException) -> None:
        self._course.abort()
        self._inner.abort(cause)

    def close(self, deadline: Deadline) -> None:
        self._inner.close(deadline)


class _Receiver(Receiver):
    def __init__(self, inner: Receiver, course: _Course) -> None:
        self._inner = inner
        self._course = course

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
    ) -> Pending:
        number = self._course.next
        self._course.next += 1
        self._course.meet(Point.RECEIVE_BEGIN, number)
        pending = self._inner.begin(header, note, fds, accept)
        return _Pending(pending, self._course, Point.RECEIVE_FINISH, number)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self._inner.on_note(note, fds)

    def abort(self, cause: BaseException) -> None:
        self._course.abort()
        self._inner.abort(cause)

    def close(self, deadline: Deadline) -> None:
        self._inner.close(deadline)


def _corrupted(payload: torch.Tensor) -> torch.Tensor:
    changed = payload.clone()
    changed[:1] ^= 0xFF
    return changed
