"""Receives that are posted before their message comes, and what the two ends say of them.

A message that meets a posted receive needs no word from its receiver: gloo sends it at once. But a
posted receive takes a message of its own size only, as a longer one ends the process, and gloo
cannot take it back. So the sender, who alone knows what it sends next, decides: a size that it has
sent before it asks the receiver to post again, under a number, with a pair of tags of its own. It
uses what has been posted for messages of exactly that size, whatever they are; where nothing fits,
the receive is posted when the header is in. One that nothing has fitted for long is released by a
message of no bytes, and posted anew for another size.

So nothing depends on what comes next. A NONE, an END, a session that is left or a shape that is
not the plan's leave a posted receive to the next message of its size, in any session.

Whether it has come is seen by the last byte of the buffer, which is another one then: a sender
whose payload ends in that very byte does not use a posted receive. So there is no trailer, and
nobody waits on gloo for bytes that may be on their way.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from stagelink.transport.contract import Port
    from stagelink_gloo.pair import Operation, Pair

__all__ = ["ABSENT", "MOST_BYTES", "STALE", "Ask", "Choice", "Places", "Posted", "parse", "tag"]

MOST_BYTES = 1024 * 1024
"""A larger message is not quicker for it, and takes longer than who looks for it should wait."""

ABSENT = 171
"""What stands at the end of a posted buffer as long as its message has not come."""

_SPIN_S = 100e-6
_SHORTEST_LOOK_S = 20e-6
_LONGEST_LOOK_S = 100e-6

_REMEMBERED = 16
"""So many sizes that met no posted receive; one that comes again is worth one."""

STALE = 64
"""A posted receive that so many messages have passed is better posted for another size."""


class Ask(enum.IntEnum):
    """Requests of a message's note, for the posted receive that it names."""

    NOTHING = 0
    """It names none."""

    TAKE = 1
    """The message goes into it; it is to be posted again for the next of this size."""

    POST = 2
    """It is to be posted for the next of this size."""

    MOVE = 3
    """It has been released by a message of no bytes, and is to be posted as by `POST`."""


class Choice(NamedTuple):
    """Path that one message takes.

    Attributes:
        ask: what the receiver is told.
        number: of the posted receive.
        size_bytes: of the message.
    """

    ask: Ask
    number: int
    size_bytes: int

    @property
    def note(self) -> bytes:
        """The note for `parse`."""
        return bytes(self[:2]) if self.ask else b""


def parse(note: bytes) -> tuple[Ask, int]:
    """Read a note: its request, and the number of the posted receive that it names."""
    if not note:
        return Ask.NOTHING, 0
    ask, number = note
    return Ask(ask), number


def tag(number: int) -> int:
    """Tag of a posted receive; 0 and 1 are those of payload and trailer of the others."""
    return number + 2


class Places:
    """Receives that are posted for a sender, as it knows them. Thread-safe.

    Args:
        most: called for how many there may be.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._made = 0
        self._sent = 0
        self._missed: deque[int] = deque(maxlen=_REMEMBERED)
        # By number: the size, and after how many messages it was posted; the oldest comes first.
        self._posted: dict[int, tuple[int, int]] = {}

    def choose(self, payload: torch.Tensor) -> Choice:
        """Choose how a message goes, which is to be sent so."""
        size_bytes = payload.numel()
        with self._lock:
            self._sent += 1
            if payload.numpy()[-1] == ABSENT:  # nobody would see it come
                return Choice(Ask.NOTHING, 0, size_bytes)
            for number, (posted_bytes, _) in self._posted.items():
                if posted_bytes == size_bytes:
                    del self._posted[number]
                    return Choice(Ask.TAKE, number, size_bytes)
            return self._miss(size_bytes)

    def _miss(self, size_bytes: int) -> Choice:
        seen = size_bytes in self._missed
        self._missed.append(size_bytes)
        if seen and size_bytes <= MOST_BYTES:
            if self._made < self._most():
                self._made += 1
                return Choice(Ask.POST, self._made - 1, size_bytes)
            for number, (_, since) in self._posted.items():
                if self._sent - since > STALE:
                    del self._posted[number]
                    return Choice(Ask.MOVE, number, size_bytes)
                break
        return Choice(Ask.NOTHING, 0, size_bytes)

    def through(self, choice: Choice) -> None:
        """The receiver has got a message, and posted what it was asked for."""
        if choice.ask:
            with self._lock:
                self._posted[choice.number] = choice.size_bytes, self._sent


class Posted:
    """One receive that is posted ahead, again and again.

    Args:
        pair: the connection with the sender's rank.
        port: of the link's end.
        number: the receive's own.
        doing: what to call it in an error.
    """

    def __init__(self, pair: Pair, port: Port, number: int, doing: str) -> None:
        self._pair = pair
        self._port = port
        self._tag = tag(number)
        self._doing = doing
        self._under_way: _UnderWay | None = None

    def post(self, size_bytes: int) -> None:
        """Post it for a message of this size, or of no bytes.

        Raises:
            RuntimeError: the connection is closed.
        """
        buffer = self._port.stream.buffer(size_bytes)
        last = buffer.numpy()[-1:].data
        last[0] = ABSENT
        operation = self._pair.receive(buffer, self._tag, self._doing)
        self._under_way = _UnderWay(buffer, last, operation)

    @property
    def comes_at_once(self) -> bool:
        """Whether the message is there, or comes within a moment, for which this blocks."""
        last = self._get().last
        if last[0] == ABSENT:
            until = time.monotonic() + _SPIN_S
            while last[0] == ABSENT and time.monotonic() < until:
                os.sched_yield()  # to gloo's own thread, perhaps
        return last[0] != ABSENT

    def wait(self) -> torch.Tensor:
        """Block until the message is there; once for each `post`.

        Returns:
            The buffer.

        Raises:
            ConnectionError: the connection was closed, here or by the peer.
            StagelinkError: the handler failed, or this end is being closed.
        """
        last, look_s = self._get().last, _SHORTEST_LOOK_S
        while last[0] == ABSENT:
            self._port.pause(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
        return self.release()

    def release(self) -> torch.Tensor:
        """Block until gloo is done with it: of what is there, or the message of no bytes.

        Returns:
            The buffer.

        Raises:
            ConnectionError: as `wait`.
        """
        under_way, self._under_way = self._get(), None
        under_way.operation.wait()
        return under_way.buffer

    def _get(self) -> _UnderWay:
        if self._under_way is None:
            raise ConnectionError(f"{self._doing}: nothing is posted, the connection is closed")
        return self._under_way


class _UnderWay(NamedTuple):
    """What is posted: the buffer, a view of its last byte, and gloo's operation."""

    buffer: torch.Tensor
    last: memoryview
    operation: Operation
