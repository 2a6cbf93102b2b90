"""Any transport without its buffers: a send is done only when its message has been received.

Small messages fit into buffers somewhere on their way, and a send that is done at once hides a
wrong order of sends and receives until messages are larger. Here every message behaves as a large
one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from stagelink.testing.ports import MutedPort
from stagelink.transport.contract import Pending, Ready, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.deadline import Deadline
    from stagelink.transport.contract import Announce, Link, Message, Port, Transport
    from stagelink.transport.header import Header

__all__ = ["rendezvous"]

_INNER = b"i"
_TAKEN = b"t"


def rendezvous(transport: type[Transport], name: str | None = None) -> type[Transport]:
    """Make a transport that works as another one, whose sends wait for the receiver.

    Args:
        transport: the one that does the work.
        name: the new transport's name; None: ``rendezvous-NAME``.

    Returns:
        The class, to be registered as any other. It takes the other's options.
    """

    def open_sender(self: Transport, link: Link, port: Port, deadline: Deadline) -> Sender:
        inner = transport.open_sender(self, link, _marked(port), deadline)
        return _Sender(inner, port)

    def open_receiver(self: Transport, link: Link, port: Port, deadline: Deadline) -> Receiver:
        inner = transport.open_receiver(self, link, _marked(port), deadline)
        return _Receiver(inner, port)

    attributes = {
        "__doc__": f"{transport.__name__}, whose sends wait for the receiver.",
        "__module__": __name__,
        "name": name or f"rendezvous-{transport.name}",
        "capabilities": replace(transport.capabilities, copies_on_begin=False),
        "open_sender": open_sender,
        "open_receiver": open_receiver,
    }
    return type(f"Rendezvous{transport.__name__}", (transport,), attributes)


class _MarkedPort(MutedPort):
    """Marks the transport's own notes, among which the wrapper's travel."""

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        self._port.note(_INNER + note, fds)


def _marked(port: Port) -> Port:
    return cast("Port", _MarkedPort(port))


class _Sender(Sender):
    def __init__(self, inner: Sender, port: Port) -> None:
        self._inner = inner
        self._port = port
        self._begun = 0
        self._taken = 0
        self.tells = inner.tells_sent

    def begin(self, message: Message, announce: Announce) -> Pending | None:
        pending = self._inner.begin(message, announce)
        if pending is None:
            return None
        self._begun += 1
        return _Sending(pending, self, self._begun)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        if note == _TAKEN:
            self._taken += 1
            self._port.wake()
        else:
            self._inner.on_note(note.removeprefix(_INNER), fds)

    def wait_taken(self, count: int, deadline: Deadline) -> None:
        if not self._port.wait(lambda: self._taken >= count, deadline):
            raise TimeoutError(f"nobody received the message within {deadline.seconds:g} s")

    def abort(self, cause: BaseException) -> None:
        self._inner.abort(cause)

    def close(self, deadline: Deadline) -> None:
        self._inner.close(deadline)


class _Sending(Pending):
    def __init__(self, inner: Pending, sender: _Sender, number: int) -> None:
        self._inner = inner
        self._sender = sender
        self._number = number

    def finish(self, deadline: Deadline) -> None:
        if self._sender.tells:  # its finish is not to be called before
            self._sender.wait_taken(self._number, deadline)
        self._inner.finish(deadline)
        self._sender.wait_taken(self._number, deadline)


class _Receiver(Receiver):
    def __init__(self, inner: Receiver, port: Port) -> None:
        self._inner = inner
        self._port = port

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
    ) -> Pending:
        pending = self._inner.begin(header, note, fds, accept)
        if isinstance(pending, Ready):
            self._port.note(_TAKEN)
            return pending
        return _Receiving(pending, self._port)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self._inner.on_note(note.removeprefix(_INNER), fds)

    def abort(self, cause: BaseException) -> None:
        self._inner.abort(cause)

    def close(self, deadline: Deadline) -> None:
        self._inner.close(deadline)


class _Receiving(Pending):
    def __init__(self, inner: Pending, port: Port) -> None:
        self._inner = inner
        self._port = port

    def finish(self, deadline: Deadline) -> torch.Tensor | None:
        payload = self._inner.finish(deadline)
        self._port.note(_TAKEN)
        return payload
