"""One transport wrapped in another, which does all that the wrapper does not change."""

# ruff: noqa: D102 - the calls are the contract's

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch

from stagelink.deadline import Deadline
from stagelink.transport.contract import (
    Announce,
    Done,
    Link,
    Message,
    Port,
    Receiver,
    Sender,
    Transport,
)
from stagelink.transport.header import Header

Accept = Callable[[], torch.Tensor]
E = TypeVar("E", bound=Sender | Receiver)


class WrappedEnd(Generic[E]):
    """An end that passes on all but ``begin``: the base of senders and receivers."""

    def __init__(self, inner: E, port: Port) -> None:
        self.inner = inner
        self.port = port

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self.inner.on_note(note, fds)

    def abort(self, cause: BaseException) -> None:
        self.inner.abort(cause)

    def close(self, deadline: Deadline) -> None:
        self.inner.close(deadline)


class WrappedSender(WrappedEnd[Sender], Sender):
    """A sender that passes every call on."""

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        return self.inner.begin(message, announce, done)


class WrappedReceiver(WrappedEnd[Receiver], Receiver):
    """A receiver that passes every call on."""

    def begin(
        self, header: Header, note: bytes, fds: Sequence[int], accept: Accept, done: Done
    ) -> None:
        self.inner.begin(header, note, fds, accept, done)


class WrappedDone:
    """Core's `Done`; for a wrapper that delays or judges completion to give to the end inside.

    When the message is done, ``instead`` is called with the payload, in place of core's.
    """

    def __init__(
        self, done: Done, instead: Callable[[torch.Tensor | None], object] | None = None
    ) -> None:
        self.done = done
        self._instead = instead or done

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        self._instead(payload)

    def failed(self, error: BaseException) -> None:
        self.done.failed(error)


class WrappedPort:
    """Core's port; passes everything on. Its ``act`` calls the actions that are watched."""

    def __init__(self, port: Port) -> None:
        self.port = port

    def watch(self, fd: int, action: Callable[[], bool], *, writable: bool = False) -> None:
        self.port.watch(fd, _Action(action, self.act), writable=writable)

    def act(self, action: Callable[[], bool]) -> bool:
        return action()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)


@dataclass(frozen=True)
class _Action:
    """Equal for equal actions, by which core knows those that share a descriptor."""

    action: Callable[[], bool]
    act: Callable[[Callable[[], bool]], bool] = field(compare=False)

    def __call__(self) -> bool:
        return self.act(self.action)


def wrapped(
    transport: type[Transport],
    name: str,
    *,
    sender: Callable[[Sender, Port], Sender] = WrappedSender,
    receiver: Callable[[Receiver, Port], Receiver] = WrappedReceiver,
    port: Callable[[Port], object] = lambda port: port,
    **attributes: object,
) -> type[Transport]:
    """Make a transport that works as another one but for what is given.

    Args:
        transport: the one that does the work.
        name: the new transport's name, by which a plan asks for it.
        sender: wraps each sender; called with it and with its port.
        receiver: wraps each receiver; as ``sender``.
        port: wraps each port, for the end inside and its wrapper.
        attributes: others of the class, such as ``capabilities``.

    Returns:
        The class, to be registered as any other. It takes the other's options.
    """

    def open_sender(self: Transport, link: Link, given: Port, deadline: Deadline) -> Sender:
        mine = cast("Port", port(given))
        return sender(transport.open_sender(self, link, mine, deadline), mine)

    def open_receiver(self: Transport, link: Link, given: Port, deadline: Deadline) -> Receiver:
        mine = cast("Port", port(given))
        return receiver(transport.open_receiver(self, link, mine, deadline), mine)

    own = {
        "__doc__": f"{transport.__name__} as {name!r}.",
        "__module__": __name__,
        "name": name,
        "open_sender": open_sender,
        "open_receiver": open_receiver,
    }
    return type(f"Wrapped{transport.__name__}", (transport,), own | attributes)
