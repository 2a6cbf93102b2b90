"""A transport held against the contract: each call of core's to it, and each of its to core.

What is found is kept, and raised where a call may raise; so a broken rule is told in the words of
the contract, whatever else goes wrong because of it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from stagelink.deadline import Deadline
from stagelink.testing.wrapping import (
    Accept,
    E,
    WrappedDone,
    WrappedEnd,
    WrappedPort,
    WrappedReceiver,
    WrappedSender,
    wrapped,
)
from stagelink.transport.contract import Announce, Done, Message, Port, Receiver, Sender, Transport
from stagelink.transport.header import Header
from stagelink.transport.payload import payload_problem

__all__ = ["PATIENCE_S", "ContractCheck", "checked"]

PATIENCE_S = 4.0
"""Seconds that a call may take which has to return at once or by a deadline: tests run on machines
with other things to do."""


@dataclass
class ContractCheck:
    """Violations of the contract by a transport on one rank. Thread-safe.

    Attributes:
        patience_s: seconds beyond its limit after which a call counts as blocked.
        broken: a text for each rule that was broken.
    """

    patience_s: float = PATIENCE_S
    broken: list[str] = field(default_factory=list)

    def broke(self, what: str) -> AssertionError:
        """Note a broken rule; the error is to be raised where a call may raise."""
        self.broken.append(what)
        return AssertionError(what)

    def verify(self) -> None:
        """Check that no rule was broken.

        Raises:
            AssertionError: with all that were.
        """
        if self.broken:
            raise AssertionError("against the contract: " + "; ".join(dict.fromkeys(self.broken)))

    @contextmanager
    def quick(self, call: str, limit_s: float = 0.0) -> Iterator[None]:
        """Note it if the body takes longer than its limit and the patience."""
        began = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - began
            if took_s > limit_s + self.patience_s:
                self.broke(f"{call} took {took_s:.1f} s, it had {limit_s:g} s")

    @contextmanager
    def silent(self, call: str) -> Iterator[None]:
        """Note it if the body raises, or blocks."""
        with self.quick(call):
            try:
                yield
            except Exception as error:
                self.broke(f"{call} raised {type(error).__name__}: {error}")


def checked(transport: type[Transport], check: ContractCheck) -> type[Transport]:
    """Make a transport that works as another one, held against the contract."""

    def close(self: Transport, deadline: Deadline) -> None:
        with check.quick("Transport.close", deadline.remaining_s):
            transport.close(self, deadline)

    return wrapped(
        transport,
        f"checked-{transport.name}",
        sender=partial(_Sender, check),
        receiver=partial(_Receiver, check),
        port=partial(_Port, check),
        close=close,
    )


class _Port(WrappedPort):
    def __init__(self, check: ContractCheck, port: Port) -> None:
        super().__init__(port)
        self._check = check

    def watch(self, fd: int, action: Callable[[], bool], *, writable: bool = False) -> None:
        # Equal for equal actions, by which core knows those that share a descriptor.
        self.port.watch(fd, _Action(action, self._check), writable=writable)


@dataclass(frozen=True)
class _Action:
    action: Callable[[], bool]
    check: ContractCheck = field(compare=False)

    def __call__(self) -> bool:
        with self.check.quick("an action of Port.watch"):
            again: object = self.action()
        if not isinstance(again, bool):
            raise self.check.broke(f"an action of Port.watch returns {again!r}, no bool")
        return again


class _End(WrappedEnd[E]):
    """Checks of both ends: ``begun`` has the messages that have begun and are not done."""

    name: ClassVar[str]
    what: ClassVar[str]

    def __init__(self, check: ContractCheck, inner: E, port: Port) -> None:
        super().__init__(inner, port)
        self.check = check
        self.begun: list[_Done] = []
        self.aborted = False

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        with self.check.silent(f"{self.name}.on_note"):
            super().on_note(note, fds)

    def abort(self, cause: BaseException) -> None:
        self.aborted = True
        with self.check.silent(f"{self.name}.abort"):
            super().abort(cause)

    def close(self, deadline: Deadline) -> None:
        with self.check.quick(f"{self.name}.close", deadline.remaining_s):
            super().close(deadline)


class _Done(WrappedDone, ABC):
    """Checks of a message's completion: once, in order, and as ``problem`` has it."""

    def __init__(self, done: Done, end: _End[Any]) -> None:
        super().__init__(done)
        self.begins = True  # its ``begin`` has not returned
        self.told = False
        self._end = end
        end.begun.append(self)

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        problem = self._order_problem() or self.problem(payload)
        if problem is None or self._end.aborted:  # what is said after that is not taken
            self.done(payload)
        else:
            self.done.failed(self.broke(problem))

    def failed(self, error: BaseException) -> None:
        problem = self._order_problem()
        self.done.failed(error if problem is None or self._end.aborted else self.broke(problem))

    def broke(self, problem: str) -> AssertionError:
        return self._end.check.broke(f"a {self._end.what} {problem}")

    @abstractmethod
    def problem(self, payload: torch.Tensor | None) -> str | None:
        """What is wrong with saying so now, in words."""

    def _order_problem(self) -> str | None:
        if self.told:
            return "is done twice"
        late = not self.begins and self is not self._end.begun[0]
        self.told = True
        self._end.begun.remove(self)
        return "is done before the one that began before it" if late else None


class _Sent(_Done):
    announced = False

    def __init__(self, done: Done, end: _End[Any], announce: Announce) -> None:
        super().__init__(done, end)
        self._announce = announce

    def announce(self, note: bytes = b"", fds: Sequence[int] = ()) -> None:
        if self.announced:
            raise self.broke("is announced twice")
        self.announced = True
        self._announce(note, fds)

    def problem(self, payload: torch.Tensor | None) -> str | None:
        if not self.announced:
            return "is done and was not announced"
        return None if payload is None else "is done with a payload"


class _Received(_Done):
    def __init__(self, done: Done, end: _End[Any], accept: Accept, size_bytes: int) -> None:
        super().__init__(done, end)
        self._accept = accept
        self._size_bytes = size_bytes
        self._device = end.port.stream.device.type
        self._lent: torch.Tensor | None = None

    def accept(self) -> torch.Tensor:
        if self.told or self._lent is not None:
            raise self.broke(f"asks for a buffer {'when it is done' if self.told else 'twice'}")
        self._lent = self._accept()
        return self._lent

    def problem(self, payload: torch.Tensor | None) -> str | None:
        return payload_problem(payload, self._size_bytes, self._lent, self._device)


class _Sender(_End[Sender], WrappedSender):
    name, what = "Sender", "send"

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        sent = _Sent(done, self, announce)
        with self.check.quick("Sender.begin"):
            taken: object = super().begin(message, sent.announce, sent)
        sent.begins = False
        if not isinstance(taken, bool):
            raise self.check.broke(f"Sender.begin returns {taken!r}, no bool")
        if not taken and (sent.announced or sent.told):
            did = "announced" if sent.announced else "said that the message is done"
            raise self.check.broke(f"Sender.begin returns False after it has {did}")
        if not taken:
            self.begun.remove(sent)
        return taken


class _Receiver(_End[Receiver], WrappedReceiver):
    name, what = "Receiver", "receive"

    def begin(
        self, header: Header, note: bytes, fds: Sequence[int], accept: Accept, done: Done
    ) -> None:
        received = _Received(done, self, accept, header.payload_bytes)
        begin: Callable[..., object] = self.inner.begin
        with self.check.quick("Receiver.begin"):
            returned = begin(header, note, fds, received.accept, received)
        received.begins = False
        if returned is not None:
            raise self.check.broke(f"Receiver.begin returns {returned!r}, where None is due")
