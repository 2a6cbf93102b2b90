"""Access of a transport's end of a link to core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.distributed import Store

from stagelink.deadline import Deadline
from stagelink.transport.link import Link
from stagelink.transport.streams import Stream


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
        """Maximum number of unanswered messages on this link, the sum of its edges' windows.

        The maximum of all sessions so far: a session with larger windows raises it. Size receive
        memory for this many, as the receiver's user may hold on to most of them. A gradient is
        the answer to its activation, and takes the same credit.
        """

    @property
    def stream(self) -> Stream:
        """The link's stream; current wherever core calls ``open_*`` and ``begin``."""

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        """Send a note to the twin's ``on_note``; returns at once.

        Notes and headers arrive in the order in which they were sent. What arrives before the
        twin is open is held for it.
        """

    def room(self) -> None:
        """Ask again the `Sender` whose ``begin`` returned False; returns at once.

        As its ``begin`` may run in this call, hold none of your locks. Out of a ``begin`` it is
        asked again when that has returned.
        """

    def fail(self, error: BaseException) -> None:
        """Report a failure that is no message's own; it fails the whole handler.

        A peer's death, or its goodbye, that becomes known within half a second explains it
        instead; so long it may block. On the reading thread it returns at once, and is told then.
        """

    def watch(self, fd: int, action: Callable[[], bool], *, writable: bool = False) -> None:
        """Have core's reader watch a descriptor, and call ``action()`` whenever it is ready.

        So a library with an event descriptor makes progress on whichever thread reads, without a
        thread of its own: the caller that waits for a message, or core's standby reader while
        nobody waits. Level-triggered. Several links may watch one descriptor with equal actions,
        as those that share a worker do: it is called once per event.

        An exception out of the action fails the handler, as `Port.fail` does. Watching ends with
        `Port.unwatch`, or before this end's ``close`` is called.

        Args:
            fd: the descriptor, this link's until it is unwatched.
            action: makes progress; it may call ``done``, `Port.room` and all that a note may. It
                never waits and takes much less than a millisecond. Returns whether it is to be
                called again in the next turn of reading though the descriptor may not be ready:
                because it took only a share of the work, or could not arm the library's event.
            writable: whether to call also when the descriptor can be written to. To change it,
                watch again: a later call of this link for a descriptor replaces the former.
        """

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor for this link; idempotent.

        Waits for an action that is running on another thread, so hold none of your locks that the
        action takes.
        """

    def wait(self, ready: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        """Block until ``ready()`` is true; False when the deadline passed first.

        ``ready`` is asked again after every message that arrives and after every `Port.wake`; it
        must be quick and must not block. Wakes on signals. Refused in a ``begin``, an ``on_note``
        and an action.

        Args:
            ready: the condition.
            deadline: None: however long it takes.

        Raises:
            StagelinkError: the handler failed or this end is being closed, or the peer has gone
                for good; a peer that only says goodbye still takes what is on its way to it.
        """

    def pause(self, seconds: float) -> None:
        """Block for a moment: to look again and again at what can notify nobody.

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
