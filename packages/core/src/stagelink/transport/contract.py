"""What a transport is: the classes that a plugin author subclasses and those that core hands in.

A transport moves the bytes of messages that both ends already know. Core owns everything else:
which message goes where, in what order, how many may be under way, who has died. For each *link*
(an ordered pair of ranks with one transport) the sending rank opens a `Sender`, the receiving rank
a `Receiver`; the two are twins, and talk through *notes* on core's own connection.

The life of one message::

    sender's rank                                   receiver's rank
    Sender.begin(message, announce) -> Pending
      announce(note)  ── header and note ──▶        Receiver.begin(header, note, fds, accept) ->
      Pending
    Pending.finish(deadline)   ═══ payload ═══▶     Pending.finish(deadline) -> tensor

Threads: core calls ``begin`` of one link never from two threads at once, and ``finish`` in the
order of ``begin``, once each. ``on_note`` runs on the thread that reads the control plane, or on
the one that opened the end for notes that came before; ``abort`` on whichever thread failed. Both
return at once and never raise.
"""

# ruff: noqa: B027 - to do nothing is a fine default for notes, abort and close

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from stagelink.deadline import Deadline

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from stagelink.transport.header import Header
    from stagelink.transport.lanes import Lane

__all__ = [
    "API_VERSION",
    "FINISHED",
    "Announce",
    "Capabilities",
    "Deadline",
    "Footprint",
    "Link",
    "Message",
    "NoOptions",
    "Pending",
    "Place",
    "Port",
    "Ready",
    "Receiver",
    "Sender",
    "Transport",
    "Verdict",
]

API_VERSION = (1, 1)
"""Major and minor version of this contract.

A transport states the version it was written for. The same major and a minor not newer than core's
is accepted: minors only add.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Yes, or no with the reason; true where it is yes.

    A yes of `Transport.probe` may have a reason as well: what ``stagelink doctor`` should tell.
    """

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, as declared by its author.

    Attributes:
        devices: kinds of device whose tensors it carries: ``"cpu"``, ``"cuda"``.
        auto_rank: place in the order that ``auto`` tries; the highest comes first. Core's loopback
            has 0, a network transport about 10, one within a server about 20, one within a GPU
            server about 30.
        same_server: needs both ends on one server.
        distinct_processes: needs the ends in two processes.
        same_process: needs both ends in one process.
        in_flight: messages of one link that may have begun and not finished, on either end.
        copies_on_begin: when ``Sender.begin`` returns a pending, the payload has been read, and
            the caller may overwrite it; otherwise core makes the copy.
        caller_thread: ``Receiver``'s ``finish`` wakes on abort and on signals (it waits only
            through `Port.wait`), so core runs it in the thread that asks for the message.
        dtypes: names of the only element types it carries; None: every one, as bytes.
    """

    devices: frozenset[str]
    auto_rank: int
    same_server: bool = False
    distinct_processes: bool = False
    same_process: bool = False
    in_flight: int = 1
    copies_on_begin: bool = False
    caller_thread: bool = False
    dtypes: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """An ordered pair of ranks and the transport between them.

    Attributes:
        source: the sending rank.
        target: the receiving rank.
        transport: the transport's name.
        device: kind of device of the tensors on it.
    """

    source: int
    target: int
    transport: str
    device: str

    def __str__(self) -> str:
        return f"{self.source}→{self.target} by {self.transport}"


class Footprint(NamedTuple):
    """What one link may take of a server's memory beside the tensors that it carries.

    Attributes:
        slots: messages that may be in it at once.
        size_bytes: all of it.
    """

    slots: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where one end of a link is, for `Transport.can_connect`.

    Attributes:
        rank: its rank.
        server: equal on two ranks exactly when they are on one server.
        process: equal on two ranks exactly when they are threads of one process.
        description: what the rank's own `Transport.describe` said.
    """

    rank: int
    server: str
    process: str
    description: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message on its way out.

    Attributes:
        header: kind, edge, microbatch, dtype, shape and size.
        payload: flat uint8 tensor of ``header.payload_bytes`` bytes, contiguous. Read-only for the
            transport, valid until ``finish`` returns (with ``copies_on_begin``: until ``begin``
            does). On a device with streams it is there for what is queued on the link's lane, and
            ``finish`` returns when it has been read, not only when that is queued.
    """

    header: Header
    payload: torch.Tensor


class Announce(Protocol):
    """Tell the receiver's rank that a message is coming. Call it exactly once per message."""

    def __call__(self, note: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send the header with a note of the transport's own; returns at once.

        Args:
            note: up to 16 MiB for the twin's `Receiver.begin`.
            fds: file descriptors to hand over, where the connection is a Unix one. They are
                duplicated at once; the caller keeps its own.
        """


class Port(Protocol):
    """A link's access to core. Every method may be called from any thread."""

    link: Link

    @property
    def rank(self) -> int:
        """This end's rank."""

    @property
    def peer(self) -> int:
        """The other end's rank."""

    @property
    def address(self) -> str:
        """This host's address, IPv4 or IPv6, at which the peer is known to reach it.

        That of the control connection between servers, and loopback within one.
        """

    @property
    def window(self) -> int:
        """How many messages of the link may be under way: what its edges' windows add up to.

        The most of any session so far; a session with larger windows raises it.
        Those that have been sent and not answered yet; the receiver's user holds on to most of
        them. A gradient is the answer to its activation, and has a place in the same window.
        """

    @property
    def lane(self) -> Lane:
        """The link's stream; current wherever core calls ``open_*``, ``begin`` and ``finish``."""

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        """Send a note to the twin's ``on_note``; returns at once.

        Notes and headers arrive in the order in which they were sent. What arrives before the
        twin is open is held for it.
        """

    def room(self) -> None:
        """Ask again the `Sender` whose ``begin`` returned None; returns at once.

        Out of a ``begin`` it is asked again when that has returned.
        """

    def sent(self) -> None:
        """The ``finish`` of the oldest message that has begun here will not block: call it now.

        For a `Sender` that says ``tells_sent``; once for each message. Out of its ``begin`` or
        ``finish`` it is done when that has returned.
        """

    def fail(self, error: BaseException) -> None:
        """Report a failure found outside ``begin`` and ``finish``; it fails the whole handler.

        A peer's death that becomes known within half a second explains it instead; so long it may
        block, except on the reading thread.
        """

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Block until ``ready()`` is true; False when the deadline passed first.

        ``ready`` is asked again after every message that arrives and after every `Port.wake`; it
        must be quick and must not block. Wakes on signals. Refused in a ``begin``.

        Raises:
            StagelinkError: the handler failed or was closed meanwhile, or the peer has gone for
                good; a peer that only says goodbye still takes what is on its way to it.
        """

    def pause(self, seconds: float) -> None:
        """Block for a moment: for whoever looks again and again at what can tell nobody.

        Unlike `Port.wait` it reads nothing, and does not mind that the peer has closed.

        Raises:
            StagelinkError: the handler failed, or this end is being closed.
        """

    def wake(self) -> None:
        """Have every `Port.wait` ask its condition again; returns at once."""

    def call(self, action: Callable[[], None]) -> None:
        """Have ``action()`` called soon, on the thread that reads next; returns at once.

        Takes no lock: a finalizer, which may run in the middle of anything, can use it. The action
        returns at once and never raises. It is not called any more when the handler is closed.
        """

    def store(self) -> Store:
        """A store client that no other thread uses, under a prefix of this pair and transport.

        Both links of the pair, and both ends, see the same keys. To be asked for only during
        ``open_sender`` and ``open_receiver``, and of use until the end is closed; its calls may
        block.
        """

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Borrow a flat uint8 CPU tensor; it returns to the pool when the last view of it dies."""


class Pending(ABC):
    """One message that has begun and not finished."""

    @abstractmethod
    def finish(self, deadline: Deadline) -> torch.Tensor | None:
        """Wait until the payload is through; may block.

        Returns:
            On a sender None. On a receiver None when the payload is in the accepted buffer, else a
            flat uint8 tensor of exactly the payload's size that nobody will write again. On a
            device with streams it is there for what is queued on the link's lane afterwards.

        Raises:
            TimeoutError: the deadline passed. Where a receiver says ``caller_thread`` it may be
                called again, with another deadline.
            Exception: anything else that went wrong; core reports it as a `TransportError` with
                this as its cause, and fails the handler.
        """


class Ready(Pending):
    """A message that is through already: core takes the payload at once, and waits for nobody.

    Args:
        payload: on a receiver what `Pending.finish` returns, see there.
    """

    def __init__(self, payload: torch.Tensor | None = None) -> None:
        self.payload = payload

    def finish(self, deadline: Deadline) -> torch.Tensor | None:
        """Return the payload; never blocks."""
        del deadline
        return self.payload


FINISHED = Ready()
"""What ``begin`` returns when nothing is left to wait for: the link then needs no worker."""


class Sender(ABC):
    """The sending end of one link.

    Attributes:
        tells_sent: it calls `Port.sent` when the ``finish`` of its oldest message will not block,
            so that no thread need wait in it.
    """

    tells_sent = False

    @abstractmethod
    def begin(self, message: Message, announce: Announce) -> Pending | None:
        """Start one message without waiting for the peer.

        Calls ``announce`` once, here or in the returned pending's ``finish``, as soon as the peer
        may start. Order of ``begin`` is the order in which the peer sees the headers.

        Returns:
            The pending; `FINISHED` when nothing is left to do; None when there is no room now.
            After None nothing may have been announced, and core asks again after `Port.room`.
        """

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """A note from the twin. Runs on the reading thread: return at once, never raise.

        The descriptors are this object's to close.
        """

    def abort(self, cause: BaseException) -> None:
        """Make every blocked ``finish`` return or raise: the handler failed. Returns at once.

        Or, with a `stagelink.PeerClosedError` as its cause, the receiver has closed for good, and
        only this link is given up: whatever its ``finish`` does then, nothing counts as delivered.

        The peer need not see it: core tells it, and aborts its end. But where it does, as the end
        of a stream say, that must not pass for the end of a message.
        """

    def close(self, deadline: Deadline) -> None:
        """Give back what ``open_sender`` took. No message is under way any more.

        On a thread of its own, which is left behind where this does not return by the deadline.
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
    ) -> Pending:
        """Start receiving a message whose header is in, whether or not the user has asked for it.

        Must not block; returns a `Ready` where the payload is here already. ``accept()`` lends a
        flat uint8 buffer of exactly ``header.payload_bytes`` bytes for the payload; a transport
        that has memory of its own need not call it. The descriptors are this object's to close.
        """

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """As `Sender.on_note`."""

    def abort(self, cause: BaseException) -> None:
        """As `Sender.abort`."""

    def close(self, deadline: Deadline) -> None:
        """Give back what ``open_receiver`` took. No message is under way any more."""


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
        """What a peer must know to judge a link: small JSON-able values, a device's uuid say."""
        return {}

    def lane(self, link: Link) -> Lane | None:
        """Where a link's copies are queued; called once for each end, where `connect` is called.

        For an author of a transport to another kind of device than CUDA to override.

        Returns:
            The lane; None for host memory.
        """
        if link.device != "cuda":
            return None
        from stagelink.transport.lanes import CudaLane  # noqa: PLC0415 - only where there are GPUs

        return CudaLane()

    def footprint(self, window: int, message_bytes: int | None) -> Footprint | None:
        """What a link would take of memory shared by its ends, for ``stagelink plan`` to tell.

        Args:
            window: as `Port.window`.
            message_bytes: of its largest message; None where that is not known.

        Returns:
            The most that it takes; None for a transport that takes nothing worth telling.
        """
        del window, message_bytes
        return None

    def can_connect(self, link: Link, local: Place, remote: Place) -> Verdict:
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
