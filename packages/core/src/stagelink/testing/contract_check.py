"""A transport held against the contract: each call of core's to it, and each of its to core.

What is found is kept, and raised where a call may raise; so a broken rule is told in the words of
the contract, whatever else goes wrong because of it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch

from stagelink.deadline import Deadline
from stagelink.links.arrival import Key
from stagelink.testing.blocked import Call, Calls
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

PATIENCE_S = 4.0
"""Seconds that a call may take which has to return at once or by a deadline: tests run on machines
with other things to do."""

_LOOK_S = 0.1
_BUSY_TURNS = 20
"""Turns in that time which nobody needs who has nothing to do."""


class UnfinishedError(AssertionError):
    """A transport owes core a call without which a message goes no further."""


class ContractCheck:
    """Violations of the contract by a transport on one rank. Thread-safe.

    Args:
        patience_s: seconds beyond its limit after which a call counts as blocked.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self.broken: list[str] = []  # a text for each rule that was broken
        self.unfinished: list[str] = []  # and for each end that does not go on with a message
        self.turns = 0  # how often an action was called, which ``turn`` describes
        self.turn = ""
        leads = {
            _Done.__call__.__code__: "done()",
            _Done.failed.__code__: "done.failed()",
            _Port.room.__code__: "port.room()",
        }
        self._calls = Calls(patience_s, self.broke, leads)

    def start(self) -> None:
        """Look at calls also while they block, until `verify`."""
        self._calls.start()

    def broke(self, what: str) -> AssertionError:
        """Note a broken rule; the error is to be raised where a call may raise."""
        self.broken.append(what)
        return AssertionError(what)

    def verify(self) -> None:
        """Check that no rule was broken, and look at calls no more.

        Raises all that were; `UnfinishedError` if it is only that something was not done.
        """
        self._calls.stop()
        found = dict.fromkeys([*self.broken, *self.unfinished])
        if found:
            kind = AssertionError if self.broken else UnfinishedError
            raise kind("against the contract: " + "; ".join(found))

    def verify_idle(self) -> None:
        """Check, when all messages are through, that no action is called on and on."""
        until = Deadline(self.patience_s)
        while True:
            before = self.turns
            time.sleep(_LOOK_S)
            if (turns := self.turns - before) < _BUSY_TURNS:
                return
            if until.passed:
                raise self.broke(
                    f"{self.turn}, for ever: {turns} times in {_LOOK_S:g} s, "
                    f"{self.patience_s:g} s after the last message was through"
                )

    def quick(
        self, call: str, limit_s: float = 0.0, port: Port | None = None, *, silent: bool = False
    ) -> Call:
        """Note it if the body takes longer than its limit and the patience; see `Call`."""
        return Call(self._calls, call, limit_s, port, silent=silent)


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
        self.rooms = 0

    def act(self, action: Callable[[], bool]) -> bool:
        check = self._check
        with check.quick("an action of Port.watch", port=self.port):
            again: object = action()
        if not isinstance(again, bool):
            raise check.broke(f"an action of Port.watch returns {again!r}, no bool")
        check.turns += 1
        why = "returns True" if again else "leaves its descriptor ready"
        check.turn = f"an action of Port.watch {why}, and is called again"
        return again

    def call(self, action: Callable[[], None]) -> None:
        def called() -> None:
            self._check.turns += 1
            self._check.turn = "an action of Port.call has itself called again"
            action()

        self.port.call(called)

    def room(self) -> None:
        self.rooms += 1
        self.port.room()


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
        with self.check.quick(f"{self.name}.on_note", port=self.port, silent=True):
            super().on_note(note, fds)

    def abort(self, cause: BaseException) -> None:
        self.end()
        with self.check.quick(f"{self.name}.abort", silent=True):
            super().abort(cause)

    def close(self, deadline: Deadline) -> None:
        self.end()
        with self.check.quick(f"{self.name}.close", deadline.remaining_s):
            super().close(deadline)

    def end(self) -> None:
        """Look at what it has left undone: nothing is taken from it any more."""
        if not self.aborted:
            self.aborted = True
            for done in self.begun[:1]:  # what has begun after that waits for it
                self.owes(done, "it neither called done() nor done.failed()")

    def owes(self, done: _Done, why: str) -> None:
        """Note what was not done in half the time after which it counts as not done at all."""
        age_s, link = time.monotonic() - done.began_s, self.port.link
        if not done.begins and age_s > self.check.patience_s / 2:
            which = f"link {link.source}→{link.target}: the {self.what} of {done.message}"
            left = f"began {age_s:.1f} s before its end was closed or aborted"
            self.check.unfinished.append(f"{which} {left}, and {why}")


class _Done(WrappedDone, ABC):
    """Checks of a message's completion: once, in order, and as ``problem`` has it."""

    def __init__(self, done: Done, end: _End[Any], header: Header) -> None:
        super().__init__(done)
        key = Key(header.session, header.edge, header.direction, header.microbatch)
        self.message = f"{key} on edge 'e{header.edge}', {header.payload_bytes} bytes,"
        self.began_s = time.monotonic()
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

    def __init__(self, done: Done, end: _End[Any], header: Header, announce: Announce) -> None:
        super().__init__(done, end, header)
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
    def __init__(self, done: Done, end: _End[Any], header: Header, accept: Accept) -> None:
        super().__init__(done, end, header)
        self._accept = accept
        self._size_bytes = header.payload_bytes
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

    def __init__(self, check: ContractCheck, inner: Sender, port: Port) -> None:
        super().__init__(check, inner, port)
        self._refused: _Sent | None = None
        self._rooms = 0

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        sent = _Sent(done, self, message.header, announce)
        self._refused, self._rooms = None, self.rooms
        with self.check.quick("Sender.begin", port=self.port):
            taken: object = super().begin(message, sent.announce, sent)
        sent.begins = False
        if not isinstance(taken, bool):
            raise self.check.broke(f"Sender.begin returns {taken!r}, no bool")
        if not taken and (sent.announced or sent.told):
            did = "announced" if sent.announced else "said that the message is done"
            raise self.check.broke(f"Sender.begin returns False after it has {did}")
        if not taken:
            self.begun.remove(sent)
            self._refused = sent
        return taken

    @property
    def rooms(self) -> int:
        return cast("_Port", self.port).rooms

    def end(self) -> None:
        if not self.aborted and self._refused is not None and self._rooms == self.rooms:
            self.owes(
                self._refused,
                "Sender.begin, which returned False then, has not called port.room() since",
            )
        super().end()


class _Receiver(_End[Receiver], WrappedReceiver):
    name, what = "Receiver", "receive"

    def begin(
        self, header: Header, note: bytes, fds: Sequence[int], accept: Accept, done: Done
    ) -> None:
        received = _Received(done, self, header, accept)
        begin: Callable[..., object] = self.inner.begin
        with self.check.quick("Receiver.begin", port=self.port):
            returned = begin(header, note, fds, received.accept, received)
        received.begins = False
        if returned is not None:
            raise self.check.broke(f"Receiver.begin returns {returned!r}, where None is due")
