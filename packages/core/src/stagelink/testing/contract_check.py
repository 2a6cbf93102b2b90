"""A transport held against the contract: each call of core's to it, and each of its to core.

What is found is kept, and raised where a call may raise; so a broken rule is told in the words of
the contract, whatever else goes wrong because of it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stagelink.testing.wrapping import (
    E,
    WrappedDone,
    WrappedEnd,
    WrappedPort,
    WrappedReceiver,
    WrappedSender,
    wrapped,
)
from stagelink.transport.contract import Receiver, Sender
from stagelink.transport.payload import payload_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from stagelink.deadline import Deadline
    from stagelink.transport.contract import (
        Announce,
        Done,
        Message,
        Port,
        Transport,
    )
    from stagelink.transport.header import Header

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
    """Make a transport that works as another one, held against the contract.

    Args:
        transport: the one that does the work.
        check: told of what it does wrong.

    Returns:
        The class, named ``checked-NAME``.
    """

    def close(self: Transport, deadline: Deadline) -> None:
        with check.quick("Transport.close", deadline.remaining_s):
            transport.close(self, deadline)

    return wrapped(
        transport,
        f"checked-{transport.name}",
        sender=lambda inner, port: _Sender(inner, port, check, "Sender", "send"),
        receiver=lambda inner, port: _Receiver(inner, port, check, "Receiver", "receive"),
        port=lambda port: _Port(port, check),
        close=close,
    )


class _Port(WrappedPort):
    def __init__(self, port: Port, check: ContractCheck) -> None:
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


class _Order:
    """The messages of one end that have begun and are not done.

    Args:
        what: a message of this end is: ``"send"`` or ``"receive"``.
        check: told of what is wrong.
    """

    def __init__(self, what: str, check: ContractCheck) -> None:
        self.what = what
        self.check = check
        self.begun: list[_Done] = []
        self.aborted = False

    def problem(self, done: _Done) -> str | None:
        """Take a message for done; what is wrong with that."""
        if self.aborted:  # whatever is said now is not taken
            return None
        if done.told:
            return f"a {self.what} is done twice"
        late = not done.begins and done is not self.begun[0]
        done.told = True
        self.begun.remove(done)
        return f"a {self.what} is done before the one that began before it" if late else None


class _Done(WrappedDone):
    """A message's completion: once, in order.

    Attributes:
        told: whether it is done.
        begins: whether its ``begin`` has not returned.
    """

    def __init__(self, done: Done, order: _Order) -> None:
        super().__init__(done)
        self._order = order
        self.told = False
        self.begins = True
        order.begun.append(self)

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        problem = self._order.problem(self) or self.problem(payload)
        if problem is None:
            self.done(payload)
        else:
            self.done.failed(self._order.check.broke(problem))

    def failed(self, error: BaseException) -> None:
        problem = self._order.problem(self)
        self.done.failed(error if problem is None else self._order.check.broke(problem))

    def problem(self, payload: torch.Tensor | None) -> str | None:
        """What is wrong with a payload."""
        raise NotImplementedError

    def not_taken(self) -> None:
        """Its ``begin`` has found no room."""
        self._order.begun.remove(self)


class _Sent(_Done):
    announced = 0

    def __init__(self, done: Done, order: _Order, announce: Announce) -> None:
        super().__init__(done, order)
        self._announce = announce

    def announce(self, note: bytes = b"", fds: Sequence[int] = ()) -> None:
        self.announced += 1
        if self.announced > 1:
            raise self._order.check.broke("a sender announces a message twice")
        self._announce(note, fds)

    def problem(self, payload: torch.Tensor | None) -> str | None:
        if not self.announced:
            return "a send is done whose message was not announced"
        return None if payload is None else "a send is done with a payload"


class _Received(_Done):
    def __init__(
        self,
        done: Done,
        order: _Order,
        accept: Callable[[], torch.Tensor],
        size_bytes: int,
        device: str,
    ) -> None:
        super().__init__(done, order)
        self._accept = accept
        self._size_bytes = size_bytes
        self._device = device
        self._lent: torch.Tensor | None = None

    def accept(self) -> torch.Tensor:
        if self.told or self._lent is not None:
            when = "when it is done" if self.told else "twice"
            raise self._order.check.broke(f"a receive asks for a buffer {when}")
        self._lent = self._accept()
        return self._lent

    def problem(self, payload: torch.Tensor | None) -> str | None:
        problem = payload_problem(payload, self._size_bytes, self._lent, self._device)
        return None if problem is None else f"a receive {problem}"


class _End(WrappedEnd[E]):
    def __init__(self, inner: E, port: Port, check: ContractCheck, name: str, what: str) -> None:
        super().__init__(inner, port)
        self._check = check
        self._name = name
        self._order = _Order(what, check)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        with self._check.silent(f"{self._name}.on_note"):
            super().on_note(note, fds)

    def abort(self, cause: BaseException) -> None:
        self._order.aborted = True
        with self._check.silent(f"{self._name}.abort"):
            super().abort(cause)

    def close(self, deadline: Deadline) -> None:
        with self._check.quick(f"{self._name}.close", deadline.remaining_s):
            super().close(deadline)


class _Sender(_End[Sender], WrappedSender):
    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        sent = _Sent(done, self._order, announce)
        with self._check.quick("Sender.begin"):
            taken: object = super().begin(message, sent.announce, sent)
        sent.begins = False
        if not isinstance(taken, bool):
            raise self._check.broke(f"Sender.begin returns {taken!r}, no bool")
        if not taken and (sent.announced or sent.told):
            did = "announced" if sent.announced else "said that the message is done"
            raise self._check.broke(f"Sender.begin returns False after it has {did}")
        if not taken:
            sent.not_taken()
        return taken


class _Receiver(_End[Receiver], WrappedReceiver):
    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        device = self.port.lane.device.type
        received = _Received(done, self._order, accept, header.payload_bytes, device)
        begin: Callable[..., object] = self.inner.begin
        with self._check.quick("Receiver.begin"):
            returned = begin(header, note, fds, received.accept, received)
        received.begins = False
        if returned is not None:
            raise self._check.broke(f"Receiver.begin returns {returned!r}, where None is due")
