"""Any transport without its buffers: a send is done only when its message has been received.

Small messages fit into buffers somewhere on their way, and a send that is done at once hides a
wrong order of sends and receives until messages are larger. Here every message behaves as a large
one, like a synchronous send of MPI's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from stagelink.testing.wrapping import (
    Accept,
    WrappedDone,
    WrappedPort,
    WrappedReceiver,
    WrappedSender,
    wrapped,
)
from stagelink.transport.contract import Announce, Done, Message, Port, Sender, Transport
from stagelink.transport.header import Header

_INNER = b"i"
_TAKEN = b"t"


def synchronous(transport: type[Transport], name: str | None = None) -> type[Transport]:
    """Make a transport that works as another one, whose sends wait for the receiver.

    Args:
        transport: the one that does the work.
        name: the new transport's name; None: ``synchronous-NAME``.

    Returns:
        The class, to be registered as any other. It takes the other's options.
    """
    return wrapped(
        transport,
        name or f"synchronous-{transport.name}",
        sender=_Sender,
        receiver=_Receiver,
        port=_MarkedPort,
        capabilities=replace(transport.capabilities, copies_on_begin=False),
    )


class _MarkedPort(WrappedPort):
    """Marks the transport's own notes, among which the wrapper's travel."""

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        self.port.note(_INNER + note, fds)

    def taken(self, number: int) -> None:
        self.port.note(_TAKEN + b"%d" % number)


class _Sender(WrappedSender):
    """Completes messages in order, each when it is done inside and the receiver has it."""

    def __init__(self, inner: Sender, port: Port) -> None:
        super().__init__(inner, port)
        self._begun: deque[_Sending] = deque()
        self._completing = threading.Lock()
        self._taken: set[int] = set()
        self._next = 0

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        sending = _Sending(done, self.complete, self._next)
        self._begun.append(sending)
        taken = self.inner.begin(message, announce, sending)
        if not taken:
            self._begun.pop()
        self._next += taken
        return taken

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        if note.startswith(_TAKEN):
            self._taken.add(int(note.removeprefix(_TAKEN)))
            self.complete()
        else:
            self.inner.on_note(note.removeprefix(_INNER), fds)

    def complete(self) -> None:
        """Complete what can be; a thread that finds another at it leaves it to that one."""
        while self._can_complete() and self._completing.acquire(blocking=False):
            try:
                while self._can_complete():
                    sending = self._begun.popleft()
                    self._taken.remove(sending.number)
                    sending.done()
            finally:
                self._completing.release()

    def _can_complete(self) -> bool:
        head = next(iter(self._begun), None)
        return head is not None and head.inside and head.number in self._taken


class _Sending(WrappedDone):
    def __init__(self, done: Done, complete: Callable[[], None], number: int) -> None:
        super().__init__(done)
        self.number = number
        self.inside = False
        self._complete = complete

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        del payload
        self.inside = True
        self._complete()


class _Receiver(WrappedReceiver):
    next = 0

    def begin(
        self, header: Header, note: bytes, fds: Sequence[int], accept: Accept, done: Done
    ) -> None:
        tell = partial(cast("_MarkedPort", self.port).taken, self.next)
        self.next += 1

        def taken(payload: torch.Tensor | None) -> None:
            tell()
            done(payload)

        self.inner.begin(header, note, fds, accept, WrappedDone(done, taken))

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self.inner.on_note(note.removeprefix(_INNER), fds)
