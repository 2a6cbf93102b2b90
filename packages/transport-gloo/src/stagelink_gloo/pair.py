"""The gloo connection of one pair of ranks, and the rules by which its handles are safe.

Gloo cannot be asked whether an operation is done, only waited for, and it is unforgiving: a handle
that is dropped early wedges the connection, one that is waited for twice blocks, and a receive
into a buffer that is too small ends the process. So every handle stays in its pair's hands until
it has been waited for, once, by the first that comes: a link's end that needs it, or the clean-up.

A wait that runs out of time closes every connection of its group. A group here has one connection,
and the clean-up closes it by a spare receive that nobody answers. Operations that wait for their
peer then raise at once; one whose bytes are on their way is not told, but once the connection is
closed it, too, can be waited for briefly and let go.
"""

from __future__ import annotations

import logging
import math
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stagelink.transport.board import Board
from stagelink.transport.gloo_groups import break_off, gloo_group, keep_in_child
from stagelink.transport.interrupts import stops_caller
from stagelink_gloo.addresses import address_for, check_route

if TYPE_CHECKING:
    import torch

    from stagelink.transport.addresses import Address
    from stagelink.transport.contract import Deadline, Port

__all__ = ["Operation", "Pair", "connect"]

logger = logging.getLogger("stagelink")
_AT_ONCE = timedelta(milliseconds=1)
_FOREVER = timedelta(days=365)
"""What stands for no deadline: without one gloo takes the group's."""


_CONNECT_ROUNDS = 5
"""How often gloo waits for the group's time-out before it gives up connecting."""

_LEAST_ROUND = timedelta(seconds=9)
"""A lookup of a name may take five seconds; so this is the least where there is time for two."""


class Operation:
    """One send or receive in flight; keeps its buffer alive.

    Args:
        handles: the pair's handles that nobody has waited for yet.
        buffer: what is sent or received into.
        doing: what to call it in an error.
    """

    __slots__ = ("_buffer", "_doing", "_handles")

    def __init__(self, handles: dict[Operation, Any], buffer: torch.Tensor, doing: str) -> None:
        self._handles = handles
        self._buffer = buffer
        self._doing = doing

    def wait(self) -> None:
        """Block until it is done; once.

        Raises:
            ConnectionError: the connection was closed, here or by the peer.
        """
        handle = self._handles.pop(self, None)
        if handle is None:
            raise ConnectionError(f"{self}: given up, the connection is closed")
        try:
            handle.wait(_FOREVER)
        except RuntimeError as error:
            if stops_caller(error):
                raise
            raise ConnectionError(f"{self}: {error}") from error
        finally:
            del handle  # a traceback that is kept would keep gloo's threads with it

    def __str__(self) -> str:
        return f"{self._doing} {self._buffer.numel()} bytes"

    def let_go(self) -> None:
        """See that it is done or the connection closed, unless somebody else waits for it."""
        handle = self._handles.pop(self, None)
        if handle is not None:
            try:
                handle.wait(_AT_ONCE)
            except RuntimeError as error:  # why it failed, if it did, is known
                if stops_caller(error):
                    raise


class Pair:
    """The connection of two ranks, for the links of both directions. Safe from any thread.

    Args:
        group: a `ProcessGroupGloo` of these two ranks only.
        me: this rank's number in it, 0 or 1.
        peer: the other's rank in the plan.
    """

    def __init__(self, group: Any, me: int, peer: int) -> None:
        self._group = group
        self._other = 1 - me
        self._peer = peer
        self._handles: dict[Operation, Any] = {}
        self._lock = threading.Lock()
        self._breaker: threading.Thread | None = None
        keep_in_child(self)

    def send(self, buffer: torch.Tensor, tag: int, doing: str) -> Operation:
        """Start to send ``buffer``, flat and contiguous; returns at once.

        Gloo reads the buffer once the peer has posted its receive, not now.

        Raises:
            RuntimeError: the connection is closed.
        """
        with self._lock:
            return self._own(self._group.send([buffer], self._other, tag), buffer, doing)

    def receive(self, buffer: torch.Tensor, tag: int, doing: str) -> Operation:
        """Start to receive into ``buffer``; returns at once.

        The peer's message of that tag must have exactly its size: a longer one ends the process.

        Raises:
            RuntimeError: the connection is closed.
        """
        with self._lock:
            return self._own(self._group.recv([buffer], self._other, tag), buffer, doing)

    def _own(self, handle: Any, buffer: torch.Tensor, doing: str) -> Operation:
        operation = Operation(self._handles, buffer, doing)
        self._handles[operation] = handle
        return operation

    def break_off(self) -> None:
        """Close the connection and make every wait on it end; returns at once.

        It is done by a thread of its own within milliseconds.
        """
        with self._lock:
            if self._breaker is None and self._group is not None:
                self._breaker = break_off(
                    self._group,
                    1 - self._other,
                    2,
                    name=f"stagelink-gloo-break-{self._peer}",
                    then=self._let_go,
                )

    def _let_go(self) -> None:
        with self._lock:
            left = tuple(self._handles)
        for operation in left:
            operation.let_go()

    def close(self, deadline: Deadline) -> None:
        """Give everything back, by the deadline; what is still in flight is broken off."""
        with self._lock:  # a breaker seen here has started, and from here on none begins
            breaker = self._breaker
            group, self._group = self._group, None
        if breaker is not None:
            breaker.join(min(deadline.remaining_s, threading.TIMEOUT_MAX))
        self._let_go()
        del group  # not before its handles


def connect(port: Port, interface: str | None, deadline: Deadline) -> Pair:
    """Connect this rank with the port's peer; blocks until the peer does the same.

    Args:
        port: its store must be under a prefix that was never used before.
        interface: name of the network interface; None: see `address_for`.
        deadline: for both together.

    Raises:
        TimeoutError: the peer did not come in time.
        ConnectionError: the interface has no address, the store failed or the peer is unreachable.
    """
    me = int(port.rank > port.peer)
    mine = address_for(port, interface)
    ends = f"rank {port.rank} at {mine.text} ({mine.reason}) connecting with rank {port.peer}"
    try:
        board = Board(port, deadline)
        theirs = _meet(board, me, port, mine)
        ends += f" at {theirs}"
        # The peer is there: it is a matter of milliseconds, unless it dies between.
        timeout = _round(deadline)
        group = gloo_group(board.store, me, 2, address=mine.text, timeout=timeout, threads=0)
    except RuntimeError as error:
        if stops_caller(error):
            raise
        raise _failure(f"{ends} by gloo", deadline, error) from error
    logger.info("rank %d: gloo with rank %d at %s (%s)", port.rank, port.peer, *mine)
    return Pair(group, me, port.peer)


def _round(deadline: Deadline) -> timedelta:
    """How long gloo tries before it tries again."""
    round_ = _time_left(deadline, _CONNECT_ROUNDS)
    return max(round_, _LEAST_ROUND) if _time_left(deadline, 2) >= _LEAST_ROUND else round_


def _meet(board: Board, me: int, port: Port, mine: Address) -> str:
    """Wait for the peer and find a route to it; its address.

    The second wait is for the peer to have found its own: gloo would wait for it in vain.
    """
    theirs = _swap(board, "here", me, mine.text, port)
    check_route(port, mine, theirs)
    _swap(board, "reachable", me, "1", port)
    return theirs


def _swap(board: Board, key: str, me: int, value: str, port: Port) -> str:
    """Give a value for the peer's."""
    board.put(f"{key}/{me}", value)
    return board.take(f"{key}/{1 - me}", f"rank {port.peer} did not come")


def _time_left(deadline: Deadline, rounds: int = 1) -> timedelta:
    seconds = deadline.remaining_s / rounds
    # Upwards, so that the deadline has passed when it is over; and 0 would be the group's own.
    return timedelta(milliseconds=max(1, math.ceil(1000 * seconds)))


def _failure(what: str, deadline: Deadline, error: RuntimeError) -> OSError:
    if deadline.passed:
        return TimeoutError(f"{what}: not done within {deadline.seconds:g} s")
    return ConnectionError(f"{what}: {error}")
