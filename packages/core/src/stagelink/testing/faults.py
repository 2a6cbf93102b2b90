"""Transports that go wrong on purpose: any transport, with faults at chosen messages of its links.

For tests of what surrounds a transport, and of conformance tests themselves. Small payloads travel
inside the header's message and meet no transport: set ``inline_bytes = 0``, or send larger ones.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stagelink.deadline import Deadline
from stagelink.errors import UsageError
from stagelink.testing.wrapping import (
    Accept,
    E,
    WrappedDone,
    WrappedEnd,
    WrappedReceiver,
    WrappedSender,
    wrapped,
)
from stagelink.transport.blocking import Finisher
from stagelink.transport.contract import Announce, Done, Message, Port, Receiver, Sender, Transport
from stagelink.transport.header import Header


class Point(enum.Enum):
    """A point in a message's life: a call of core to a transport, or one of its completions."""

    SEND_BEGIN = "Sender.begin"
    SEND_FINISH = "completion of the send"
    RECEIVE_BEGIN = "Receiver.begin"
    RECEIVE_FINISH = "completion of the receive"


class Gate:
    """A gate to wait at: closed until `open` is called, then open for good."""

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

    def wait(self, given_up: Callable[[], bool]) -> bool:
        """Block until the gate is open; False when it was given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or given_up())
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
    """The call raises the error, or the completion becomes a failure with it."""

    at: Point
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(_Fault):
    """The message is not through until a gate opens; if it never does, the message is lost.

    Attributes:
        at: one of the two completions.
        until: the gate. Abort ends the wait with an error.

    Raises:
        UsageError: ``at`` is a ``begin``, which must not block.
    """

    at: Point
    until: Gate

    def __post_init__(self) -> None:
        if self.at in {Point.SEND_BEGIN, Point.RECEIVE_BEGIN}:
            raise UsageError(f"a message can be held at its completion, not in {self.at.value!r}")


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
    return wrapped(
        transport, name, sender=partial(_Sender, faults), receiver=partial(_Receiver, faults)
    )


class _End(WrappedEnd[E]):
    """An end with the faults that it meets, by the number of its messages."""

    def __init__(self, faults: Sequence[Fail | Hold | Corrupt], inner: E, port: Port) -> None:
        super().__init__(inner, port)
        ends = (port.link.source, port.link.target)
        self._faults = [fault for fault in faults if fault.link in {None, ends}]
        self._aborted = False
        self.next = 0
        # All behind one that is held are, as messages are done in order.
        holds = any(isinstance(fault, Hold) for fault in self._faults)
        self.finisher = Finisher(port) if holds else None

    def of(self, message: int) -> list[Fail | Hold | Corrupt]:
        return [fault for fault in self._faults if fault.message == message]

    def enter(self, point: Point) -> None:
        """Fail if the next message fails in this ``begin``."""
        for fault in self.of(self.next):
            if isinstance(fault, Fail) and fault.at is point:
                raise fault.error

    def wait(self, gate: Gate) -> None:
        """Wait at a gate until it opens, or this end is aborted."""
        if not gate.wait(lambda: self._aborted):
            raise ConnectionAbortedError("aborted while the message was held")

    def abort(self, cause: BaseException) -> None:
        self._aborted = True
        for fault in self._faults:
            if isinstance(fault, Hold):
                fault.until.nudge()
        super().abort(cause)

    def close(self, deadline: Deadline) -> None:
        if self.finisher is not None:
            self.finisher.close(deadline)
        super().close(deadline)


class _Done(WrappedDone):
    """Completes a message unless a fault is here."""

    def __init__(self, done: Done, end: _End[Any], point: Point) -> None:
        super().__init__(done)
        self._end = end
        self._point = point
        self._message = end.next
        self.kept: object = None

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        if self._end.finisher is not None:
            self._end.finisher.submit(partial(self._meet, payload), self.done)
            return
        try:
            self._meet(payload)
        except BaseException as error:
            self.done.failed(error)
        else:
            self.done(payload)

    def _meet(self, payload: torch.Tensor | None) -> torch.Tensor | None:
        for fault in self._end.of(self._message):
            match fault:
                case Fail(at=at, error=error) if at is self._point:
                    raise error
                case Hold(at=at, until=gate) if at is self._point:
                    self._end.wait(gate)
        return payload


class _Sender(_End[Sender], WrappedSender):
    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        self.enter(Point.SEND_BEGIN)
        mine = _Done(done, self, Point.SEND_FINISH)
        if any(isinstance(fault, Corrupt) for fault in self.of(self.next)):
            changed = message.payload.clone()
            changed[:1] ^= 0xFF
            mine.kept = message = message._replace(payload=changed)
        taken = super().begin(message, announce, mine)
        self.next += taken  # else the same message comes again
        return taken


class _Receiver(_End[Receiver], WrappedReceiver):
    def begin(
        self, header: Header, note: bytes, fds: Sequence[int], accept: Accept, done: Done
    ) -> None:
        self.enter(Point.RECEIVE_BEGIN)
        mine = _Done(done, self, Point.RECEIVE_FINISH)
        self.next += 1
        super().begin(header, note, fds, accept, mine)
