"""Handles that ``send`` and ``irecv`` return, to wait on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from stagelink.deadline import Deadline
from stagelink.links.out_link import SendJob
from stagelink.links.route import OutRoute

_Sent = tuple[OutRoute, SendJob]


class AnyFuture(Protocol):
    """Common part of torch's futures and the standard library's."""

    def done(self) -> bool:
        """Whether it has a result or an error."""

    def add_done_callback(self, callback: Callable[[Any], Any], /) -> Any:
        """Call back with the future when it is done, on any thread; at once if it is."""


class SendHandle:
    """A send that may still be in flight.

    The tensor must not be changed before it is done if it was sent with ``copy=False``.
    """

    def __init__(
        self,
        sent: Sequence[_Sent],
        wait: Callable[[Sequence[_Sent], Deadline], None],
        deadline: Callable[[float | None], Deadline],
    ) -> None:
        self._sent = sent
        self._wait = wait
        self._deadline = deadline

    def done(self) -> bool:
        """Whether the tensor's memory is the caller's again; never blocks."""
        return all(job.finished for _, job in self._sent)

    def wait(self, deadline_s: float | None = None) -> None:
        """Block until `done`.

        Args:
            deadline_s: seconds to wait at most; None: the plan's ``limits.deadline_s``.

        Raises:
            DeadlineError: it took longer.
            PeerClosedError: a receiver closed for good before the message was through.
            StagelinkError: the handler failed or was closed.
        """
        self._wait(self._sent, self._deadline(deadline_s))


SENT = SendHandle((), lambda sent, deadline: None, lambda seconds: Deadline(0))
"""What every send returns that is done when it returns."""


class RecvHandle:
    """A receive that may still have to wait."""

    def __init__(
        self, ready: Callable[[], bool], take: Callable[[float | None], torch.Tensor | None]
    ) -> None:
        self._ready = ready
        self._take = take
        self._taken = False
        self._value: torch.Tensor | None = None

    def done(self) -> bool:
        """Whether `wait` would return without waiting for a peer; never blocks."""
        return self._taken or self._ready()

    def wait(self, deadline_s: float | None = None) -> torch.Tensor | None:
        """The tensor, as `Session.recv` gives it; the same object when called again.

        Args:
            deadline_s: seconds to wait at most; None: the plan's limits.
        """
        if not self._taken:
            self._value = self._take(deadline_s)
            self._taken = True
        return self._value
