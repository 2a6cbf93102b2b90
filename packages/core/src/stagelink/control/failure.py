"""Failure of a rank's handler: set once, raised in every caller, told to every rank.

The first failure stays; later ones change nothing.
"""

from __future__ import annotations

import _thread
import enum
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from stagelink.control.reader import Reader
from stagelink.deadline import Deadline
from stagelink.errors import (
    AbortedError,
    ClosedError,
    ForkedError,
    PeerClosedError,
    StagelinkError,
    TransportError,
)
from stagelink.transport.interrupts import stops_caller

_EXPLAIN_S = 0.5


class State(enum.Enum):
    """Progress of a handler towards its end; a failure is not part of it."""

    OPEN = enum.auto()
    CLOSING = enum.auto()
    """Callers' waits end."""

    LEAVING = enum.auto()
    """This rank needs nothing more of its peers."""

    CLOSED = enum.auto()
    FORKED = enum.auto()
    """This process is a fork of the one that connected."""


_OPEN = State.OPEN  # asked several times a message: an enum's attribute is slow


class Failure:
    """The failure of one rank's handler.

    To ``tell`` is to send the cause to all peers but the one that told this rank, at once.
    """

    def __init__(
        self,
        rank: int,
        reader: Reader,
        ended: Mapping[int, str],
        tell: Callable[[int | None], None],
    ) -> None:
        self.state = State.OPEN  # whether the handler is open otherwise
        # what every later call raises; None while nothing has failed
        self.error: StagelinkError | None = None
        # what other ranks are told: the ``rank`` where it began and its ``text``
        self.cause: Mapping[str, Any] = {}
        self._rank = rank
        self._reader = reader
        self._ended = ended
        self._tell = tell
        self._forked: ForkedError | None = None
        self._reported = False
        reader.on_error = self.fail_reading
        self._callbacks: list[Callable[[StagelinkError], None]] = []

    def on_failure(self, callback: Callable[[StagelinkError], None]) -> None:
        """Call back once when the handler fails; on any thread, must return at once."""
        self._callbacks.append(callback)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that connected."""
        return self.state is State.FORKED

    def enter(self, state: State) -> None:
        """Take the next step towards the end."""
        self.state = state
        self._reader.ending = True

    # -- for callers

    def check(self) -> None:
        """Raise if the handler can no longer be used.

        `ForkedError` in a process forked from the one that connected, the failure, as a fresh
        exception with the same cause, or `ClosedError`.
        """
        if self.state is _OPEN and self.error is None:
            return
        try:
            self.check_failure()
        except StagelinkError:
            self._reported = True
            raise
        raise ClosedError(f"rank {self._rank} is closed")

    def check_failure(self) -> None:
        """Raise like `check`, but not while the handler is being closed."""
        error = self._forked or self.error
        if error is not None:
            # As a new object: one that is raised from two threads would mix their tracebacks.
            fresh = type(error).__new__(type(error), *error.args)
            fresh.args = error.args
            fresh.__dict__.update(error.__dict__)
            raise fresh from error.__cause__

    def check_reported(self) -> None:
        """Raise a failure that no caller has been told of yet."""
        if not self._reported:
            self.check_failure()

    def interrupted(self, error: BaseException, *, foreign: bool = False) -> None:
        """Fail if what leaves a call is a signal handler's exception, Ctrl-C included.

        It may have come in the middle of anything, a frame half dispatched, so the handler is of
        no use any more; the other ranks are told what came. The exception stays the caller's.
        With ``foreign`` the same holds of all that are not this library's: where there is no
        memory for a copy, the message has taken its credit, and will not go.
        """
        stopped = stops_caller(error) and not isinstance(error, GeneratorExit)
        if stopped or (foreign and not isinstance(error, StagelinkError)):
            how = "was stopped by" if stopped else "failed:"
            text = f": {error}" if str(error) else ""
            failure = AbortedError(f"rank {self._rank} {how} {type(error).__name__}{text}")
            failure.__cause__ = error
            self.fail(failure)

    # -- failing

    def fail(
        self,
        error: StagelinkError,
        *,
        origin: int | None = None,
        text: str | None = None,
        told_by: int | None = None,
    ) -> None:
        """Poison the handler and tell every rank; the first failure stays. Returns at once.

        Every later call on this rank raises the error. The other ranks hear where it began, here
        without ``origin``, and a text, the error's own without one; but not the peer that told us.
        """
        with self._reader.lock:
            if self.state is State.CLOSED or self.error is not None:
                return
            self.cause = {
                "rank": self._rank if origin is None else origin,
                "text": text or str(error),
            }
            self.error = error
            self._reader.ending = True
            # With the lock held: who sees the failure may close at once, and then nothing more is
            # sent.
            self._tell(told_by)
        with ExitStack() as told:  # all of them, also where a caller's own raises
            told.callback(self._reader.changed)
            for callback in reversed(self._callbacks):
                told.callback(callback, error)

    def fail_as_told(self, cause: Mapping[str, Any], told_by: int | None = None) -> None:
        """Fail with the cause of another rank's failure, see `cause`."""
        origin, text = cause.get("rank"), str(cause.get("text"))
        told = AbortedError(f"rank {origin} reports: {text}")
        self.fail(told, origin=origin, text=text, told_by=told_by)

    def fail_reading(self, error: BaseException) -> None:
        """Fail with what went wrong on the reading thread, where it is none of a signal's."""
        if stops_caller(error):
            self.interrupted(error)
            raise error
        if isinstance(error, TransportError):
            self._blame_elsewhere(error)
        elif isinstance(error, StagelinkError):
            self.fail(error)
        else:
            wrapped = TransportError(f"rank {self._rank} failed while reading: {error!r}")
            wrapped.__cause__ = error
            self.fail(wrapped)

    def fail_forked(self, text: str) -> None:
        """Raise `ForkedError` in every later call, and tell nobody."""
        self._forked = ForkedError(text)
        self.enter(State.FORKED)

    def blame(self, error: StagelinkError, peer: int | None = None) -> None:
        """Fail with a transport's error, unless reading explains it better within a moment.

        A transport often notices first that a peer is gone, but only the end of the peer's
        connection says that it died, or that it had said goodbye. On the reading thread it
        returns at once, and another waits, so that reading goes on meanwhile. `PeerClosedError`
        where the peer has gone, after a goodbye: that is no failure.
        """
        if self._reader.reads_here:
            self._blame_elsewhere(error, peer)
        else:
            self._blame_here(error, peer)

    def _blame_here(self, error: StagelinkError, peer: int | None) -> None:
        ended, explained = self._ended, Deadline(_EXPLAIN_S)
        self._reader.wait(lambda: self.error is not None or peer in ended, explained)
        self._fail_unless_ended(error, peer)

    def _fail_unless_ended(self, error: StagelinkError, peer: int | None) -> None:
        ended = self._ended
        if peer is not None and peer in ended and self.error is None:
            raise PeerClosedError(
                f"rank {self._rank}: peer rank {peer} {ended[peer]}: {error}"
            ) from error
        self.fail(error)

    def _blame_elsewhere(self, error: StagelinkError, peer: int | None = None) -> None:
        def blame() -> None:
            with suppress(PeerClosedError):  # then it is no failure
                self._blame_here(error, peer)

        try:
            # Below `threading`, whose threads tell when they have begun: this must not block.
            _thread.start_new_thread(blame, ())
        except RuntimeError:  # there is no memory for one
            self.fail(error)

    def raise_blamed(self, error: StagelinkError, peer: int | None = None) -> NoReturn:
        """`blame`, then raise what explains it best; for a caller's thread.

        On the reading thread it fails now: a message that has not gone must not be missed by its
        peer, which then fails first and is taken for the cause.
        """
        if stops_caller(error):
            self.interrupted(error)
            raise error
        if self._reader.reads_here:
            self._fail_unless_ended(error, peer)
        else:
            self.blame(error, peer)
            self.check()
        raise error
