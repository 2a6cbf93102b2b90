"""Core's own transport: between ranks that are threads of one process.

It makes a whole pipeline debuggable in one process and is the oracle of the tests. With
``rendezvous = true`` a send never completes locally: its bytes stay with the sender until the
receiver has taken them, as on a wire without buffers, which brings out mistakes of order that
buffering hides.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from stagelink.transport.contract import (
    API_VERSION,
    FINISHED,
    Announce,
    Capabilities,
    Deadline,
    Link,
    Message,
    Pending,
    Port,
    Receiver,
    Sender,
    Transport,
    Verdict,
)
from stagelink.transport.hooks import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.header import Header

__all__ = ["Loopback", "LoopbackOptions"]

_shelf: dict[bytes, torch.Tensor] = {}
_tickets = itertools.count()


@dataclass(frozen=True, slots=True)
class LoopbackOptions:
    """Options in ``[transports.loopback]``.

    Attributes:
        rendezvous: a send is done only when the receiver has copied its bytes.
    """

    rendezvous: bool = False


class Loopback(Transport):
    """Hands tensors over within the process."""

    name: ClassVar[str] = "loopback"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu"}),
        auto_rank=0,
        same_server=True,
        same_process=True,
        in_flight=4,
        copies_on_begin=True,
        caller_thread=True,
    )
    Options: ClassVar[type[Any]] = LoopbackOptions

    @classmethod
    def probe(cls, options: LoopbackOptions) -> Verdict:
        """Always usable."""
        del options
        return Verdict(True)

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Needs no peer."""
        del link, deadline
        return _Sender(port, rendezvous=self.options.rendezvous)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Needs no peer."""
        del link, deadline
        return _Receiver(port)


class _Sender(Sender):
    def __init__(self, port: Port, *, rendezvous: bool) -> None:
        self._port = port
        self._rendezvous = rendezvous
        self._shelved: set[bytes] = set()

    def begin(self, message: Message, announce: Announce) -> Pending:
        ticket = b"%d" % next(_tickets)
        _shelf[ticket] = message.payload.clone()
        self._shelved.add(ticket)
        announce(ticket)
        return _Handover(self, ticket) if self._rendezvous else FINISHED

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        del fds
        self._shelved.discard(note)
        self._port.wake()

    def wait_taken(self, ticket: bytes, deadline: Deadline) -> None:
        if not self._port.wait(lambda: ticket not in self._shelved, deadline):
            raise TimeoutError(f"the peer did not take the message within {deadline.seconds} s")

    def abort(self, cause: BaseException) -> None:
        # Not on close: a peer that is slow to read still finds what was sent to it.
        del cause
        for ticket in tuple(self._shelved):
            _shelf.pop(ticket, None)


class _Handover(Pending):
    def __init__(self, sender: _Sender, ticket: bytes) -> None:
        self._sender = sender
        self._ticket = ticket

    def finish(self, deadline: Deadline) -> None:
        self._sender.wait_taken(self._ticket, deadline)


class _Receiver(Receiver):
    def __init__(self, port: Port) -> None:
        self._port = port

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
    ) -> Pending:
        del header, fds, accept  # the sender's copy becomes the receiver's tensor
        return _Taking(self._port, note, _shelf.pop(note, None))


class _Taking(Pending):
    def __init__(self, port: Port, ticket: bytes, payload: torch.Tensor | None) -> None:
        self._port = port
        self._ticket = ticket
        self._payload = payload

    def finish(self, deadline: Deadline) -> torch.Tensor:
        del deadline
        if self._payload is None:
            raise ConnectionError("the sender has given the message up")
        self._port.note(self._ticket)
        return self._payload


@hookimpl
def stagelink_register_transport() -> type[Transport]:
    """Core's transport comes in by the same door as everybody's."""
    return Loopback
