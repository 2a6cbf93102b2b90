"""Completion of messages, as a transport says it, and its room for more.

It says so on any thread, and perhaps with something of its own locked. So what it says is noted
first, and acted on by one thread at a time: the one that has the lock, which also orders
``begin``, looks at what was noted when it lets go.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from threading import get_ident
from typing import Any, Generic, TypeVar

import torch

from stagelink.errors import ClosedError, PeerClosedError, TransportError
from stagelink.links.calls import mapped
from stagelink.transport.interrupts import in_main_thread, stops_caller

_T = TypeVar("_T")


class Begun(Generic[_T]):
    """A message that a transport is given to begin, and the `Done` that it is given with it."""

    __slots__ = ("_end", "at_once", "message")

    def __init__(self, end: Completion[_T], message: _T) -> None:
        self._end = end
        self.message = message
        self.at_once = False  # whether it was done within its own ``begin``

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        """See `stagelink.transport.contract.Done`."""
        end, beginning = self._end, self._end.beginning
        if beginning is not None and beginning[1] is self and beginning[0] == get_ident():
            end.was_told.append((self, payload, None))
            self.at_once = True
        else:
            end.told(self, payload)

    def failed(self, error: BaseException) -> None:
        """See `stagelink.transport.contract.Done`."""
        if in_main_thread() and stops_caller(error):  # which is no failure of the transport's
            raise error
        self._end.told(self, None, error)


class Completion(ABC, Generic[_T]):
    """The messages that a transport has begun at one end of a link, and is not done with.

    Args:
        name: what the end does on which link, for errors.
    """

    def __init__(self, name: str) -> None:
        self.unfinished = 0  # messages that are on their way through this end, queued or in flight
        # whether none of them will be done any more: the peer or this rank has closed, or the
        # handler failed
        self.given_up = False
        self._name = name
        self._lock = threading.RLock()
        # what a transport has said that was not acted on yet; see `told`
        self.was_told: deque[tuple[Begun[_T] | None, Any, BaseException | None]] = deque()
        # the thread that is in a ``begin`` of the transport's, and of what
        self.beginning: tuple[int, Begun[_T]] | None = None
        self._begun: deque[Begun[_T]] = deque()

    def told(
        self,
        begun: Begun[_T] | None,
        payload: torch.Tensor | None = None,
        error: BaseException | None = None,
    ) -> None:
        """The transport says that a message is done, or failed, or perhaps has room (None).

        Returns at once, and begins what can begin now.
        """
        beginning = self.beginning
        self.was_told.append((begun, payload, error))
        if beginning is None or beginning[0] != get_ident():
            self._catch_up()
        elif begun is beginning[1]:
            beginning[1].at_once = True

    @property
    def begins_here(self) -> bool:
        """Whether this thread is in a ``begin`` of the transport's, which must not wait."""
        beginning = self.beginning
        return beginning is not None and beginning[0] == get_ident()

    def _catch_up(self) -> None:
        """Act on what was told, unless another thread is at it, which then looks once more."""
        try:
            while self.was_told:
                done = self._try_pump()
                if done is None:
                    return
                self._tell(done)
        except Exception as error:
            if stops_caller(error):
                raise
            self._fail_soon(error)

    def _try_pump(self) -> list[_T] | None:
        try:  # from before it has the lock: a signal handler may raise as soon as it has
            mine = self._lock.acquire(blocking=False)
            # Within a ``begin`` of this thread's own, what began it looks when that has returned.
            return self._pump() if mine and self.beginning is None else None
        finally:
            try:  # nor may one raise between here and the release
                self._lock.release()
            except RuntimeError as error:  # it is not this thread's
                if stops_caller(error):
                    raise

    @abstractmethod
    def _pump(self) -> list[_T]:
        """With the lock: take what is done, and begin what can begin; what to `_tell` of."""

    @abstractmethod
    def _tell(self, done: list[_T]) -> None:
        """Without the lock: these are done."""

    def _take_told(self) -> list[_T]:
        """With the lock: finish what the transport has said is done, and return that.

        Raises where a message has failed, or what was said of it cannot be.
        """
        done: list[_T] = []
        while self.was_told:
            begun, payload, error = self.was_told.popleft()
            if begun is None or self.given_up:
                continue
            if isinstance(error, ClosedError | PeerClosedError):
                self._give_up()
                continue
            if error is not None:
                raise mapped(self._name, error)
            if self._begun and begun is self._begun[0]:
                self._take(begun.message, payload)
                self._begun.popleft()
            else:
                self._check_order(begun)
                self._take(begun.message, payload)
                self._begun.remove(begun)
            self.unfinished -= 1
            done.append(begun.message)
        return done

    def _check_order(self, begun: Begun[_T]) -> None:
        if begun not in self._begun:
            raise TransportError(f"{self._name}: a message is done twice")
        if not begun.at_once:
            raise TransportError(
                f"{self._name}: a message is done before the one that has begun before it"
            )

    @abstractmethod
    def _take(self, message: _T, payload: torch.Tensor | None) -> None:
        """With the lock: a message is done; `TransportError` where it cannot be."""

    @abstractmethod
    def _give_up(self) -> None:
        """A message has failed because an end is closed: only this link is given up."""

    @abstractmethod
    def _fail_soon(self, error: BaseException) -> None:
        """Fail the handler; returns at once, as the transport may be anywhere when it says so."""
