"""Any transport without its buffers: a send is done only when its message has been received.

Small messages fit into buffers somewhere on their way, and a send that is done at once hides a
wrong order of sends and receives until messages are larger. Here every message behaves as a large
one, like a synchronous send of MPI's.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from stagelink.testing.wrapping import (
    WrappedDone,
    WrappedPort,
    WrappedReceiver,
    WrappedSender,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import (
        Announce,
        Done,
        Message,
        Port,
        Sender,
        Transport,
    )
    from stagelink.transport.header import Header

__all__ = ["synchronous"]

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

    def taken(self) -> None:
        self.port.note(_TAKEN)


class _Sender(WrappedSender):
    """Completes messages in order, each when it is done inside and the receiver has taken it."""

    def __init__(self, inner: Sender, port: Port) -> None:
        super().__init__(inner, port)
        self._ready: deque[Done] = deque()  # done inside, not here
        self._taken = 0  # by the receiver
        self._done = 0
        self._completing = threading.Lock()

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        return self.inner.begin(message, announce, _Sending(done, self.done_inside))

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        if note == _TAKEN:
            self._taken += 1
            self._complete()
        else:
            self.inner.on_note(note.removeprefix(_INNER), fds)

    def done_inside(self, done: Done) -> None:
        self._ready.append(done)
        self._complete()

    def _complete(self) -> None:
        """Complete what can be; a thread that finds another at it leaves it to that one."""
        while self._can_complete() and self._completing.acquire(blocking=False):
            try:
                while self._can_complete():
                    self._done += 1
                    self._ready.popleft()()
            finally:
                self._completing.release()

    def _can_complete(self) -> bool:
        return bool(self._ready) and self._taken > self._done


class _Sending(WrappedDone):
    def __init__(self, done: Done, done_inside: Callable[[Done], None]) -> None:
        super().__init__(done)
        self._done_inside = done_inside

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        del payload
        self._done_inside(self.done)


class _Receiver(WrappedReceiver):
    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        self.inner.begin(header, note, fds, accept, _Receiving(done, self.port))

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self.inner.on_note(note.removeprefix(_INNER), fds)


class _Receiving(WrappedDone):
    def __init__(self, done: Done, port: Port) -> None:
        super().__init__(done)
        self._port = cast("_MarkedPort", port)

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        self._port.taken()
        self.done(payload)
