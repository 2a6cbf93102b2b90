"""Transport contract: the classes that a plugin author subclasses and those that core hands in.

A transport moves the bytes of messages that both ends already know. Core owns everything else:
which message goes where, in what order, how many are in flight, who has died. For each *link*
(an ordered pair of ranks with one transport) the sending rank opens a `Sender`, the receiving rank
a `Receiver`; the two are twins, and talk through *notes* on core's own connection.

The life of one message::

    sender's rank                                   receiver's rank
    Sender.begin(message, announce, done) -> True
      announce(note)  ── header and note ──▶        Receiver.begin(header, note, fds, accept, done)
                      ═════ payload ═════▶            accept() -> buffer
      done()                                          done() or done(payload)

Completion is one call, ``done``: within ``begin`` where nothing is left to wait for, else from
wherever the transport learns of it: a note from the twin, a descriptor that core's reader watches
(`Port.watch`), a thread of the library's. A wire that can only block until its bytes are through
has a `stagelink.transport.blocking.Finisher` wait for them.

Threads: core calls ``begin`` of one end never from two threads at once. ``on_note`` and the
actions of `Port.watch` run on the thread that reads the control plane, on which everybody's
messages depend: they never wait, and take much less than a millisecond. A note that came before
the end was open is given on the thread that opened it. ``abort`` runs on whichever thread failed;
it returns at once and never raises.
"""

# ruff: noqa: B027 - to do nothing is a fine default for notes, abort and close

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from stagelink.deadline import Deadline
from stagelink.transport.header import Header
from stagelink.transport.link import Capabilities, Endpoint, Footprint, Link, Verdict
from stagelink.transport.port import Port
from stagelink.transport.streams import Stream

__all__ = [
    "API_VERSION",
    "Announce",
    "Capabilities",
    "Deadline",
    "Done",
    "Endpoint",
    "Footprint",
    "Link",
    "Message",
    "NoOptions",
    "Port",
    "Receiver",
    "Sender",
    "Transport",
    "Verdict",
]

API_VERSION = (2, 0)
"""Major and minor version of this contract.

A transport states the version it was written for. The same major and a minor not newer than core's
is accepted: minors only add.
"""


class Message(NamedTuple):
    """One message on its way out.

    Attributes:
        header: kind, edge, microbatch, dtype, shape and size.
        payload: flat uint8 tensor of ``header.payload_bytes`` bytes, contiguous; perhaps none.
            Read-only for the transport, valid until the message is done (with
            ``copies_on_begin``: until ``begin`` has returned True). On a device with streams it is
            there for what is queued on the link's stream, and the message is done when it has been
            read, not only when that is queued. After a failure core needs it no more: the memory
            lives for as long as the transport references the tensor.
    """

    header: Header
    payload: torch.Tensor


class Announce(Protocol):
    """Tell the receiver's rank that a message is coming. Call it exactly once per message."""

    def __call__(self, note: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send the header with a note of the transport's own; returns at once, from any thread.

        Args:
            note: up to 16 MiB for the twin's `Receiver.begin`.
            fds: file descriptors to hand over, where the connection is a Unix one. They are
                duplicated at once; the caller keeps its own.
        """


class Done(Protocol):
    """Tell core that a message is complete, or has failed: one of the two, exactly once.

    From any thread; returns at once. Within the message's own ``begin`` it is noted, and acted on
    when that has returned. Later, messages of one end are done in the order of their ``begin``.
    The next message's ``begin`` may run in this call, so hold none of your locks.

    A message that is done twice, out of order, before it was announced or with a payload of
    another size fails the handler with a `stagelink.TransportError` that says so. After ``abort``
    it does nothing.
    """

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        """On a sender: the payload is needed no more. On a receiver: it is there.

        Args:
            payload: for a receiver. None when the payload is in the accepted buffer, else a flat
                uint8 tensor of exactly its size that nobody will write again. On a device with
                streams it is there for what is queued on the link's stream from now on.
        """

    def failed(self, error: BaseException) -> None:
        """The message will never be complete; fails the handler.

        Args:
            error: becomes the cause of a `stagelink.TransportError`; a peer's death that becomes
                known within half a second explains it instead. With a `stagelink.ClosedError` or
                `stagelink.PeerClosedError`, as `Port.wait` raises them, only this link is given
                up.
        """


class Sender(ABC):
    """The sending end of one link."""

    @abstractmethod
    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """Start one message without waiting for the peer.

        Call ``announce`` once, here or later and before ``done``, as soon as the peer may start.
        Order of ``begin`` is the order in which the peer is to see the headers.

        Returns:
            True where the message is taken. False where there is no room now: then nothing has
            been announced nor done, and core asks again after `Port.room`.
        """

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """A note from the twin. Runs on the reading thread: return at once, never raise.

        The descriptors are this object's to close.
        """

    def abort(self, cause: BaseException) -> None:
        """Give up what has begun, and make whatever of yours waits return. Returns at once.

        The handler failed; or, with a `stagelink.PeerClosedError` as the cause, the receiver has
        closed for good and only this link is given up; or, with a `stagelink.ClosedError`, this
        end is being closed. No ``done`` is taken from now on, nothing counts as delivered any
        more.

        The peer need not see it: core tells it, and aborts its end. But where it does, as the end
        of a stream say, that must not pass for the end of a message.
        """

    def close(self, deadline: Deadline) -> None:
        """Give back what ``open_sender`` took.

        No ``begin``, ``on_note`` or action of this end is running or will run. What it gave to a
        library of its own, a message's payload say, it keeps until the library is done with it.

        Runs on a thread of its own, which is left behind where this does not return by the
        deadline.
        """


class Receiver(ABC):
    """The receiving end of one link."""

    @abstractmethod
    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """Start to receive one message, whether its receiver has asked for it or not.

        Runs on the reading thread, or on one that called ``done``: it does not wait. It is called
        in the order of the sender's announcements.

        Args:
            header: as the sender's message has it.
            note: as it was announced.
            fds: as announced; this object's to close.
            accept: lends a flat uint8 tensor of the payload's size, on the link's device, to be
                written on its stream; a transport that has memory of its own need not call it. To
                be called once at most, before ``done``. The memory lives for as long as the
                transport references it, also after ``abort``.
            done: to be called when the payload is there.

        Raises:
            Exception: core reports it as a `stagelink.TransportError` with this as its cause, and
                fails the handler.
        """

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """Take a note, like `Sender.on_note`."""

    def abort(self, cause: BaseException) -> None:
        """Abort, like `Sender.abort`."""

    def close(self, deadline: Deadline) -> None:
        """Give back what ``open_receiver`` took; as `Sender.close`."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a transport that has none."""


class Transport(ABC):
    """One transport on one rank. Plugins register the class; core makes one instance per handler.

    Class attributes:
        name: the word in the plan, the same as the entry point's name.
        api_version: the `API_VERSION` it was written for, as ``(major, minor)``.
        capabilities: what it can do.
        Options: a dataclass of its options in ``[transports.NAME]``, each field with a type and a
            default; unknown keys and wrong types are refused when the plan is read, and so is
            what its ``__post_init__`` raises a ValueError for.

    Args:
        options: an instance of ``Options``.
    """

    name: ClassVar[str]
    api_version: ClassVar[tuple[int, int]]
    capabilities: ClassVar[Capabilities]
    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, options: Any) -> None:
        self.options = options

    @classmethod
    @abstractmethod
    def probe(cls, options: Any) -> Verdict:
        """Whether this process could use it at all, with the reason if not.

        Cheap, in-process, without side effect; never raises or aborts for a missing library or
        device.
        """

    def describe(self) -> Mapping[str, Any]:
        """Describe this rank to peers that judge a link: JSON-able values, as a device's uuid."""
        return {}

    def stream(self, link: Link) -> Stream | None:
        """Make the stream of a link's copies; called once for each end, where `connect` is called.

        For an author of a transport to another kind of device than CUDA to override.

        Returns:
            The stream; None for host memory.
        """
        if link.device != "cuda":
            return None
        from stagelink.transport.streams import CudaStream  # noqa: PLC0415 - only where there are GPUs

        return CudaStream()

    def footprint(self, window: int, message_bytes: int | None) -> Footprint | None:
        """Estimate memory that a link shares between its ends, for ``stagelink plan`` to tell.

        Args:
            window: as `Port.window`.
            message_bytes: of its largest message; None where that is not known.

        Returns:
            The most that it takes; None for a transport that takes nothing worth telling.
        """
        del window, message_bytes
        return None

    def can_connect(self, link: Link, local: Endpoint, remote: Endpoint) -> Verdict:
        """Whether this pair can be linked, beyond what the capabilities say.

        Pure, and symmetric: both ends call it, each with itself as ``local``, and must get the
        same answer.
        """
        del link, local, remote
        return Verdict(True)

    @abstractmethod
    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Open the sending end; may block for the peer's `open_receiver`, up to the deadline.

        Runs on a thread that belongs to this pair of ranks. Both ends open the links of a pair in
        the same order.
        """

    @abstractmethod
    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Open the receiving end; as `open_sender`."""

    def close(self, deadline: Deadline) -> None:
        """Give back what the links share; all of them are closed. Returns by the deadline."""
