"""A transport under watch: each call of core's to it is held against the contract.

What is found is kept, and raised where a call may raise; so a broken rule is told in the words of
the contract, whatever else goes wrong because of it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stagelink.transport.contract import Pending, Ready, Receiver, Sender
from stagelink.transport.payload import payload_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from stagelink.deadline import Deadline
    from stagelink.transport.contract import Announce, Link, Message, Port, Transport
    from stagelink.transport.header import Header

__all__ = ["PATIENCE_S", "Watch", "watched"]

PATIENCE_S = 4.0
"""Seconds that a call may take which has to return at once or by a deadline: tests run on machines
with other things to do."""


@dataclass
class Watch:
    """What a transport did against the contract on one rank. Safe from any thread.

    Attributes:
        patience_s: seconds beyond its limit after which a call counts as blocked.
        broken: a text for each rule that was broken.
    """

    patience_s: float = PATIENCE_S
    broken: list[str] = field(default_factory=list)

    def broke(self, what: str) -> AssertionError:
        """Note a broken rule; the error is for whoever may raise."""
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


def watched(transport: type[Transport], watch: Watch) -> type[Transport]:
    """Make a transport that works as another one, under watch.

    Args:
        transport: the one that does the work.
        watch: told of what it does wrong.

    Returns:
        The class, named ``watched-NAME``.
    """

    def open_sender(self: Transport, link: Link, port: Port, deadline: Deadline) -> Sender:
        return _Sender(transport.open_sender(self, link, port, deadline), watch)

    def open_receiver(self: Transport, link: Link, port: Port, deadline: Deadline) -> Receiver:
        return _Receiver(transport.open_receiver(self, link, port, deadline), watch, port)

    def close(self: Transport, deadline: Deadline) -> None:
        with watch.quick("Transport.close", deadline.remaining_s):
            transport.close(self, deadline)

    attributes = {
        "__doc__": f"{transport.__name__} under watch.",
        "__module__": __name__,
        "name": f"watched-{transport.name}",
        "open_sender": open_sender,
        "open_receiver": open_receiver,
        "close": close,
    }
    return type(f"Watched{transport.__name__}", (transport,), attributes)


class _Announced:
    """Counts announcements of one message; passes the first on."""

    def __init__(self, announce: Announce, watch: Watch) -> None:
        self._announce = announce
        self._watch = watch
        self.count = 0

    def __call__(self, note: bytes = b"", fds: Sequence[int] = ()) -> None:
        self.count += 1
        if self.count > 1:
            raise self._watch.broke("a sender announces a message twice")
        self._announce(note, fds)

    def check(self, when: str) -> None:
        if self.count != 1:
            raise self._watch.broke(f"a sender has not announced its message {when}")


class _Sender(Sender):
    def __init__(self, inner: Sender, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch
        self.tells_sent = inner.tells_sent

    def begin(self, message: Message, announce: Announce) -> Pending | None:
        announced = _Announced(announce, self._watch)
        with self._watch.quick("Sender.begin"):
            pending: object = self._inner.begin(message, announced)
        if pending is None:
            if announced.count:
                raise self._watch.broke("Sender.begin returns None after it has announced")
            return None
        if isinstance(pending, Ready):
            announced.check("when its begin returns FINISHED")
            return pending
        if not isinstance(pending, Pending):
            raise self._watch.broke(f"Sender.begin returns {pending!r}, no Pending")
        return _Sending(pending, announced, self._watch)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        with self._watch.silent("Sender.on_note"):
            self._inner.on_note(note, fds)

    def abort(self, cause: BaseException) -> None:
        with self._watch.silent("Sender.abort"):
            self._inner.abort(cause)

    def close(self, deadline: Deadline) -> None:
        with self._watch.quick("Sender.close", deadline.remaining_s):
            self._inner.close(deadline)


class _Sending(Pending):
    def __init__(self, inner: Pending, announced: _Announced, watch: Watch) -> None:
        self._inner = inner
        self._announced = announced
        self._watch = watch

    def finish(self, deadline: Deadline) -> None:
        with self._watch.quick("a send's finish", deadline.remaining_s):
            payload = self._inner.finish(deadline)
        self._announced.check("when its finish returns")
        if payload is not None:
            raise self._watch.broke("a send's finish returns something")


class _Receiver(Receiver):
    def __init__(self, inner: Receiver, watch: Watch, port: Port) -> None:
        self._inner = inner
        self._watch = watch
        self._device = port.lane.device.type

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
    ) -> Pending:
        lent: list[torch.Tensor] = []

        def lend() -> torch.Tensor:
            lent.append(accept())
            return lent[-1]

        def check(payload: object) -> None:
            buffer = lent[-1] if lent else None
            problem = payload_problem(payload, header.payload_bytes, buffer, self._device)
            if problem is not None:
                raise self._watch.broke(f"a receive {problem}")

        with self._watch.quick("Receiver.begin"):
            pending: object = self._inner.begin(header, note, fds, lend)
        if isinstance(pending, Ready):
            check(pending.payload)
            return pending
        if not isinstance(pending, Pending):
            raise self._watch.broke(f"Receiver.begin returns {pending!r}, no Pending")
        return _Receiving(pending, check, self._watch)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        with self._watch.silent("Receiver.on_note"):
            self._inner.on_note(note, fds)

    def abort(self, cause: BaseException) -> None:
        with self._watch.silent("Receiver.abort"):
            self._inner.abort(cause)

    def close(self, deadline: Deadline) -> None:
        with self._watch.quick("Receiver.close", deadline.remaining_s):
            self._inner.close(deadline)


class _Receiving(Pending):
    def __init__(self, inner: Pending, check: Callable[[object], None], watch: Watch) -> None:
        self._inner = inner
        self._check = check
        self._watch = watch

    def finish(self, deadline: Deadline) -> torch.Tensor | None:
        with self._watch.quick("a receive's finish", deadline.remaining_s):
            payload = self._inner.finish(deadline)
        self._check(payload)
        return payload
