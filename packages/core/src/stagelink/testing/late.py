"""Any transport with a sender that is late: it does nothing of its part until it is let."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from stagelink.deadline import Deadline
from stagelink.testing.wrapping import WrappedDone, WrappedPort, WrappedSender, wrapped
from stagelink.transport.blocking import Finisher
from stagelink.transport.contract import Announce, Done, Message, Port, Sender, Transport

__all__ = ["late"]


def late(transport: type[Transport], wait: Callable[[], None]) -> type[Transport]:
    """Make a transport that works as another one, whose senders announce, and are late.

    Args:
        transport: the one that does the work.
        wait: blocks until a sender that has announced a message may go on.

    Returns:
        The class, named ``late-NAME``.
    """
    return wrapped(
        transport,
        f"late-{transport.name}",
        sender=partial(_Sender, wait),
        port=_Port,
        capabilities=replace(transport.capabilities, copies_on_begin=False),
    )


class _Port(WrappedPort):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.has_room = threading.Event()

    def room(self) -> None:
        self.has_room.set()


class _Sender(WrappedSender):
    """Takes every message, and has the sender inside begin it on a thread of its own."""

    def __init__(self, wait: Callable[[], None], inner: Sender, port: Port) -> None:
        super().__init__(inner, port)
        self._wait = wait
        self._finisher = Finisher(port)
        self._has_room = cast("_Port", port).has_room
        self._aborted = False

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        def announce_and_wait(note: bytes = b"", fds: Sequence[int] = ()) -> None:
            announce(note, fds)
            self._wait()

        begin = partial(self._begin, message, announce_and_wait, done)
        self._finisher.submit(begin, _Failure(done))
        return True

    def _begin(self, message: Message, announce: Announce, done: Done) -> None:
        while not self._aborted and not self.inner.begin(message, announce, done):
            self._has_room.wait()
            self._has_room.clear()

    def abort(self, cause: BaseException) -> None:
        self._aborted = True
        self._has_room.set()
        super().abort(cause)

    def close(self, deadline: Deadline) -> None:
        self._finisher.close(deadline)
        super().close(deadline)


class _Failure(WrappedDone):
    def __call__(self, payload: torch.Tensor | None = None) -> None:
        """Begun: the sender inside says when it is done."""
