"""Any transport with a sender that is late: its messages are not finished until it is let."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.testing.ports import muted
from stagelink.transport.contract import Pending, Ready, Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.deadline import Deadline
    from stagelink.transport.contract import Announce, Link, Message, Port, Transport

__all__ = ["late"]


def late(transport: type[Transport], wait: Callable[[], None]) -> type[Transport]:
    """Make a transport that works as another one, whose sends are finished late.

    Args:
        transport: the one that does the work.
        wait: blocks until the ``finish`` of a send may go on; on the link's worker.

    Returns:
        The class, named ``late-NAME``.
    """

    def open_sender(self: Transport, link: Link, port: Port, deadline: Deadline) -> Sender:
        return _Sender(transport.open_sender(self, link, muted(port), deadline), wait)

    attributes = {
        "__doc__": f"{transport.__name__}, whose sends are late.",
        "__module__": __name__,
        "name": f"late-{transport.name}",
        "open_sender": open_sender,
    }
    return type(f"Late{transport.__name__}", (transport,), attributes)


class _Sender(Sender):
    def __init__(self, inner: Sender, wait: Callable[[], None]) -> None:
        self._inner = inner
        self._wait = wait

    def begin(self, message: Message, announce: Announce) -> Pending | None:
        pending = self._inner.begin(message, announce)
        if pending is None or isinstance(pending, Ready):
            return pending
        return _Late(pending, self._wait, message)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self._inner.on_note(note, fds)

    def abort(self, cause: BaseException) -> None:
        self._inner.abort(cause)

    def close(self, deadline: Deadline) -> None:
        self._inner.close(deadline)


class _Late(Pending):
    def __init__(self, inner: Pending, wait: Callable[[], None], message: Message) -> None:
        self._inner = inner
        self._wait = wait
        self._message = message  # its payload is read until the end

    def finish(self, deadline: Deadline) -> None:
        self._wait()
        self._inner.finish(deadline)
